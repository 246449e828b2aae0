"""Tasks on a user's own network, given by function or by import path, and episodes of these tasks."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper.leyline import BlueprintAction, LifecycleOp
from esper.leyline.errors import DataError, EsperError, HostError
from esper.tolaria.env import MorphEnv
from esper.tolaria.tasks import TaskSpec, module_task, task_named
from esper.tolaria.tasks.user_tasks import imported_task
from tests.tolaria.building import WAIT, action, plant


class ConvThenLinear(nn.Module):
    """Network with sites of two topologies: feature maps after ``conv``, features after ``hidden``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.hidden, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        pooled = torch.relu(self.conv(x)).mean((2, 3))
        return self.head(torch.relu(self.hidden(pooled)))


GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randn(160, 1, 6, 6, generator=GENERATOR)
CLASSES = torch.arange(160) % 3


def small_task(**settings: object) -> TaskSpec:
    known = {"name": "mine", "batch_size": 16, "batches_per_epoch": 2, "horizon": 6}
    return module_task(ConvThenLinear, IMAGES, CLASSES, **(known | settings))


def make_task() -> TaskSpec:
    return small_task(name="made")


def not_a_task() -> int:
    return 3


def failing() -> TaskSpec:
    raise FileNotFoundError("data.csv")


def refused() -> TaskSpec:
    return small_task(name="refused", slots="conf")


# --- description of the task ----------------------------------------------------------------------


def test_module_task_finds_sites_of_two_topologies_and_splits_the_samples() -> None:
    task = small_task()
    assert [(site.name, site.topology, site.width) for site in task.sites] == [
        ("conv", "feature_map", 4),
        ("hidden", "features", 8),
    ]
    assert (task.num_slots, task.classes, task.input_shape) == (2, 3, (1, 6, 6))
    splits = task.load(torch.Generator().manual_seed(1))
    splits.test.unlock()
    parts = [splits.train, splits.validation, splits.test.read()]
    assert [len(part) for part in parts] == [96, 32, 32]
    assert torch.cat([part.x for part in parts]).sum() == pytest.approx(IMAGES.sum().item(), rel=1e-3)


def test_digest_of_a_users_task_changes_with_the_data() -> None:
    other = module_task(ConvThenLinear, IMAGES + 1.0, CLASSES, name="mine", batch_size=16)
    assert small_task().digest() == small_task().digest() != other.digest()


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        pytest.param(
            {"targets": CLASSES[:100]},
            DataError,
            "task 'bad' has 160 inputs and 100 targets; they must be as many, and leave at least a minibatch"
            " of 64 to train on besides 32 for validation and 32 for the test",
            id="fewer targets than inputs",
        ),
        pytest.param(
            {"batch_size": 97}, DataError, "task 'bad' has 160 inputs and 160 targets; ", id="batch too large"
        ),
        pytest.param(
            {"validation": 0.0},
            DataError,
            "task 'bad' has 160 inputs and 160 targets; ",
            id="no validation samples",
        ),
        pytest.param(
            {"build": lambda: 3},
            HostError,
            "build of task 'bad' returned int; return a torch.nn.Module",
            id="no module",
        ),
        pytest.param(
            {"slots": "conf"},
            EsperError,
            "unknown submodule of ConvThenLinear for a slot 'conf'",
            id="unknown slot",
        ),
    ],
)
def test_module_task_refuses_invalid_arguments_with_a_one_sentence_error(
    settings: dict[str, object], error: type[EsperError], sentence: str
) -> None:
    known = {"build": ConvThenLinear, "inputs": IMAGES, "targets": CLASSES, "name": "bad"}
    with pytest.raises(error) as caught:
        module_task(**(known | settings))
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("no_such_module:task", "task 'no_such_module:task': the module 'no_such_module' cannot be imported"),
        (
            f"{__name__}:nothing",
            f"task '{__name__}:nothing': {__name__} has no function 'nothing'; write one",
        ),
        (f"{__name__}:not_a_task", f"task '{__name__}:not_a_task' returned int; return esper.tolaria.tasks"),
        (f"{__name__}:failing", f"task '{__name__}:failing' failed: FileNotFoundError: data.csv"),
        (f"{__name__}:refused", "unknown submodule of ConvThenLinear for a slot 'conf'"),
    ],
    ids=["no module", "no function", "no task", "function fails", "task is refused"],
)
def test_task_given_by_an_invalid_import_path_or_function_is_refused_with_a_one_sentence_error(
    path: str, sentence: str
) -> None:
    with pytest.raises(EsperError) as caught:
        task_named(path)
    assert str(caught.value).startswith(sentence)


def test_task_given_by_import_path_is_found_in_the_working_directory_and_built_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"from {__name__} import small_task\ndef task():\n    return small_task(name='from a file')\n"
    (tmp_path / "task_in_a_file.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    found = task_named("task_in_a_file:task")
    assert found.name == "from a file"
    assert imported_task("task_in_a_file:task") is found


# --- episodes -------------------------------------------------------------------------------------


def test_episode_of_a_users_task_plants_seeds_for_feature_maps_and_for_features() -> None:
    env = MorphEnv(small_task(), rng_seed=0)
    first = env.reset()
    env.step(plant(0, BlueprintAction.CONV_LIGHT))
    facts = env.step(plant(1, BlueprintAction.MLP))

    assert env.table.occupied[0].tolist() == [True, True]
    assert first.params == sum(p.numel() for p in ConvThenLinear().parameters())
    assert facts.params == first.params + facts.grown_params > first.params
    while not env.ended:
        facts = env.step(WAIT)
    report = env.finish()
    assert math.isfinite(facts.val_loss)
    assert report.params > report.host_params == first.params


def test_environment_of_a_users_task_refuses_a_blueprint_of_another_topology() -> None:
    env = MorphEnv(small_task(), rng_seed=0)
    env.reset()
    facts = env.step(plant(1, BlueprintAction.CONV_LIGHT))
    assert not facts.last_success
    assert not env.table.occupied.any()


def test_incubating_seed_in_a_users_task_does_not_change_the_validation_loss() -> None:
    scores = []
    for first in (plant(1, BlueprintAction.MLP), WAIT):
        env = MorphEnv(small_task(incubation_epochs=2), rng_seed=0)
        env.reset()
        scores.append([env.step(step).val_loss for step in (first, WAIT)])
    assert scores[0] == scores[1]


def test_users_task_with_float_targets_is_a_regression() -> None:
    x = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    task = module_task(
        lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1)),
        x,
        x[:, :1] * x[:, 1:2],
        name="product",
        batch_size=16,
        horizon=2,
    )
    env = MorphEnv(task, rng_seed=0)
    env.reset()
    assert task.classes == 0
    assert math.isfinite(env.step(action(LifecycleOp.WAIT)).val_loss)


# --- Gymnasium ------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [make_task, f"{__name__}:make_task"], ids=["function", "import path"])
def test_gymnasium_environment_runs_a_users_task(task: object) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    import esper.gym  # Importing esper.gym registers the environment with Gymnasium.

    env = gymnasium.make(esper.gym.ENV_ID, task=task, steps=3)
    seen, _ = env.reset(seed=0)
    assert env.observation_space.contains(seen)
    actions = [plant(0, BlueprintAction.CONV_LIGHT), plant(1, BlueprintAction.MLP), WAIT]
    *_, (seen, reward, terminated, truncated, info) = (env.step(np.asarray(each)) for each in actions)
    assert env.observation_space.contains(seen)
    assert math.isfinite(reward)
    assert (terminated, truncated) == (True, False)  # The horizon counts as termination, not truncation.
    assert info["report"]["params"] > info["report"]["host_params"]


def test_gymnasium_environment_refuses_a_task_function_that_returns_no_task() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    import esper.gym  # Importing esper.gym registers the environment with Gymnasium.

    with pytest.raises(EsperError, match="task 'not_a_task' returned int; return esper"):
        gymnasium.make(esper.gym.ENV_ID, task=not_a_task)
