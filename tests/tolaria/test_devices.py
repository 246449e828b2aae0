"""Devices by name: refused names, assignment of environments, and results that do not depend on devices."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from esper.run.run_config import ConfigError, RunConfig, checked
from esper.scripts.eval_command import EvaluationConfig
from esper.simic.config import TrainingConfig
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.devices import Device, describe_map, device_of
from esper.tolaria.host_training import train_together
from esper.tolaria.tasks import task_named
from esper.tolaria.vector import SerialVector
from tests.tolaria import test_budget
from tests.tolaria.building import PLAN, WAIT, ListSink, bits, noisy_task, tiny_task
from tests.tolaria.test_reproducibility import episode_of

TWO = ("cpu:0", "cpu:1")
THERE = "there are cpu (or cpu:0 to cpu:63, the same processor under many names) and {}"
GPUS = [f"cuda:{number}" for number in range(torch.cuda.device_count())]


def test_environments_are_assigned_to_devices_in_turn_and_the_assignment_is_described_in_words() -> None:
    assert [device_of(env, TWO).name for env in range(5)] == ["cpu:0", "cpu:1", "cpu:0", "cpu:1", "cpu:0"]
    assert describe_map(TWO, 3) == "cpu:0 runs environments 0, 2; cpu:1 runs environment 1"
    assert describe_map(("cpu",), 32) == "cpu runs environments 0, 1, 2, …, 31"
    assert Device("cpu:1").torch == Device("cpu").torch == torch.device("cpu")
    assert Device("cpu:1") != Device("cpu"), "devices are compared by name"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"devices": ("gpu",)}, "'gpu' names no device; there are cpu (or cpu:0 to cpu:63, "),
        ({"devices": ("cuda:99",)}, "device 'cuda:99' is not there; there are cpu "),
        ({"devices": ("cpu:64",)}, "device 'cpu:64' is not there; there are cpu (or cpu:0 to cpu:63, "),
        ({"devices": ("cpu", "cpu:0")}, "'cpu' and 'cpu:0' are one device; name every device once"),
        ({"devices": ("cpu:1", "cpu:1")}, "'cpu:1' and 'cpu:1' are one device; name every device once"),
        ({"devices": ()}, "no device was named; there are cpu "),
        ({"policy_device": "tpu"}, "'tpu' names no device; there are cpu "),
        (
            {"amp": "float16"},
            "amp float16 needs a CUDA device; 'cpu' is none: take bfloat16, or leave amp off",
        ),
    ],
)
def test_every_configuration_class_refuses_an_unusable_device_or_precision(
    settings: dict[str, Any], sentence: str
) -> None:
    for kind in (TrainingConfig, RunConfig, EvaluationConfig):
        given = {**settings, "controller": "ppo"} if kind is RunConfig else settings
        with pytest.raises(ConfigError) as refusal:
            checked(kind, given)
        assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "rest", "envs"),
    [(TrainingConfig, {"envs": 2}, "2 environments"), (RunConfig, {}, "1 environment")],
)
def test_more_devices_than_environments_are_refused(kind: Any, rest: dict[str, int], envs: str) -> None:
    three = ("cpu:0", "cpu:1", "cpu:2")
    with pytest.raises(ConfigError) as refusal:
        checked(kind, {"devices": three, **rest})
    assert str(refusal.value).startswith(f"3 devices (cpu:0, cpu:1, cpu:2) for {envs} leave some idle; name")


def test_error_for_a_missing_device_lists_the_available_devices() -> None:
    with pytest.raises(ConfigError) as refusal:
        checked(RunConfig, {"devices": ("cuda:99",)})
    assert str(refusal.value).endswith(THERE.format(", ".join(GPUS) or "no CUDA device"))


# --- results do not depend on devices --------------------------------------------------------------


def run_vector(envs: Sequence[int], devices: Sequence[str]) -> tuple[SerialVector, ListSink, Any]:
    """Run six epochs of three minibatches; environment 1 plants seeds by ``PLAN``, all others wait."""
    sink = ListSink()
    task = noisy_task(horizon=6, batches_per_epoch=3)
    vector = SerialVector(task, rng_seed=3, env_indices=envs, sink=sink, devices=devices)
    history = [vector.reset()]
    for epoch in range(6):
        history.append(vector.step(np.stack([PLAN.get(epoch, WAIT) if env == 1 else WAIT for env in envs])))
        vector.record_decisions(None)
    vector.finish()
    return vector, sink, history


def test_environments_on_two_devices_give_the_results_of_one_device_and_of_separate_runs() -> None:
    both, one = run_vector(range(3), TWO), run_vector(range(3), ("cpu",))
    assert [env.compute.device.name for env in both[0].envs] == ["cpu:0", "cpu:1", "cpu:0"]
    for env in range(3):
        assert episode_of(*both, env=env) == episode_of(*one, env=env)
    assert episode_of(*one, env=1) == episode_of(*run_vector([1], ("cpu",)), env=1)


def test_environments_with_different_numbers_of_minibatches_give_the_results_of_separate_runs() -> None:
    """Use an environment that plants a layer in its third step and has fewer minibatches afterwards."""
    task = replace(test_budget.TASK, horizon=6, budget=6 * 25 * 10**7)

    def run_budgeted(envs: Sequence[int]) -> tuple[list[list[int]], dict[int, Any]]:
        vector, counts = SerialVector(task, rng_seed=3, env_indices=envs), []
        vector.reset()
        for step in range(6):
            actions = [test_budget.plant(0) if (env, step) == (0, 2) else WAIT for env in envs]
            vector.step(np.stack(actions))
            counts.append([len(env.host.chosen) for env in vector.envs])
        return counts, {index: bits(env.model.state()) for index, env in zip(envs, vector.envs, strict=True)}

    counts, together = run_budgeted((0, 1))
    assert counts[1] == [8, 8]
    assert counts[4][0] < counts[4][1], "250 MFLOP pay for 4 minibatches with two layers, 7 or 8 with one"
    assert together == run_budgeted((0,))[1] | run_budgeted((1,))[1]


def test_environment_whose_episode_ended_early_is_not_stepped_while_others_continue() -> None:
    sink = ListSink()
    vector = SerialVector(tiny_task(horizon=5), rng_seed=0, env_indices=(0, 1), sink=sink, rollback_limit=1)
    vector.reset()
    torch.nn.init.constant_(vector.envs[0].model.host_parameters()[0], float("nan"))
    for _ in range(5):
        facts = vector.step(np.stack([WAIT, WAIT]))
    assert facts.epoch.tolist() == [1, 5]
    assert facts.ended.all()
    assert [report.cut_short for report in vector.finish()] == [True, False]
    with pytest.raises(RuntimeError, match="all episodes have ended"):
        vector.step(np.stack([WAIT, WAIT]))


# --- one data set per device, one gather per minibatch ---------------------------------------------


class Gathers(TorchDispatchMode):
    """Counter of index operations by the data pointer of the indexed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index.Tensor:
            self.counts[args[0].data_ptr()] += 1
        return func(*args, **(kwargs or {}))


def test_every_device_has_one_copy_of_the_data_and_one_index_operation_per_minibatch() -> None:
    task = replace(task_named("digits_impaired"), batches_per_epoch=3)
    vector = SerialVector(task, rng_seed=0, env_indices=range(5), devices=TWO)
    vector.reset()
    inputs = [env.host.splits.train.inputs.data_ptr() for env in vector.envs]
    assert inputs == [inputs[0], inputs[1]] * 2 + [inputs[0]]
    assert inputs[0] != inputs[1], "two copies, although torch has one cpu device"
    assert {env.host.splits.validation.inputs.data_ptr() for env in vector.envs} == set(inputs[:2])
    for env in vector.envs:
        env.begin_step(WAIT)
    with Gathers() as gathers:
        train_together([env.host for env in vector.envs])
    assert [gathers.counts[source] for source in inputs[:2]] == [3, 3], "three minibatches"


def test_shared_batch_iterator_yields_the_samples_that_each_environment_drew() -> None:
    vector = SerialVector(task_named("digits_impaired"), rng_seed=0, env_indices=range(3), devices=TWO)
    vector.reset()
    hosts = [env.host for env in vector.envs]
    for host in hosts:
        host.begin_epoch(0)
    hosts[1].chosen = hosts[1].chosen[:1]
    numbers = []
    for number, gathered in enumerate(SharedBatchIterator(hosts)):
        numbers.append([found.env for found in gathered])
        for env, x, y in gathered:
            train, chosen = hosts[env].splits.train, hosts[env].chosen[number]
            assert torch.equal(train.scaled(x), train.x[chosen])
            assert torch.equal(y, train.y[chosen])
    assert numbers == [[0, 1, 2], *[[0, 2]] * 15]
