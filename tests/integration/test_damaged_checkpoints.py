"""Damaged or manipulated runs: ``--resume`` refuses them and executes no code from their files."""

import hashlib
import json
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.leyline.errors import EsperError
from esper.run import policy_training
from esper.run.checkpoint_file import CHECKPOINT, read_checkpoint, write_checkpoint
from esper.run.policy_training import task_of, train
from esper.run.train_checkpoint import config_of_run
from esper.simic.training.trainer import Trainer
from tests.integration.training import Refused, everything_in, tiny
from tests.tolaria.building import bits

pytestmark = pytest.mark.usefixtures("cache")
DAMAGED = 80
"""Number of damaged checkpoints to load: each is truncated or has one flipped bit."""


def refusal_to_resume(refused: Refused, run: Path) -> str:
    """Return the error message of a refused resume; check that the resume changed no file."""
    before = everything_in(run)
    said = refused("train", "--resume", run)
    assert everything_in(run) == before
    return said


# --- files of different runs ----------------------------------------------------------------------


@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_resume_of_a_run_with_an_edited_configuration_is_refused_with_the_edited_keys(
    with_checkpoint: bool, stopped: Path, refused: Refused
) -> None:
    if not with_checkpoint:
        (stopped / CHECKPOINT).unlink()
    config = json.loads((stopped / "config.json").read_text())
    for name, value in {"envs": 3, "slots": 2, "vary_slots": True, "rng_seed": 1, "iterations": 9}.items():
        (stopped / "config.json").write_text(json.dumps({**config, name: value}))
        assert f"{name} was {config[name]}, is {value}" in refusal_to_resume(refused, stopped)


def test_resume_of_a_directory_that_is_no_training_run_is_refused(
    stopped: Path, tmp_path: Path, refused: Refused
) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    assert "is no training run" in refusal_to_resume(refused, foreign)
    shutil.copy(stopped / "config.json", foreign)
    assert "holds no folder 'telemetry'" in refusal_to_resume(refused, foreign)
    (foreign / "config.json").write_text("{")
    assert "is not valid JSON" in refusal_to_resume(refused, foreign)


def test_resume_from_the_checkpoint_of_another_run_is_refused(
    stopped: Path, tmp_path: Path, refused: Refused
) -> None:
    train(tiny(rng_seed=1), tmp_path / "other")
    shutil.copy(tmp_path / "other" / CHECKPOINT, stopped)
    assert "belongs to another run; different: rng_seed" in refusal_to_resume(refused, stopped)


def test_resume_of_a_run_with_an_older_telemetry_schema_is_refused_with_the_schema_version(
    tmp_path: Path, refused: Refused
) -> None:
    """The error message names the schema version, and none of the settings that were renamed since that
    version."""
    shutil.copytree(Path(__file__).parents[1] / "old_run", tmp_path / "run")
    said = refusal_to_resume(refused, tmp_path / "run")
    assert "was written with version 2 of the tables; this version of esper reads 4: use the version" in said


def test_resume_of_a_run_with_checkpoints_of_an_earlier_version_is_refused(
    stopped: Path, refused: Refused
) -> None:
    (stopped / CHECKPOINT).unlink()
    (stopped / "checkpoints" / "iteration-00002").mkdir(parents=True)
    said = refusal_to_resume(refused, stopped)
    assert "checkpoints' was written by an earlier version of esper; resume with that one" in said


# --- pickles --------------------------------------------------------------------------------------


class Explosive:
    """Object that creates a file when the object is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("has_digest", [True, False])
def test_resume_does_not_execute_a_pickle_in_place_of_a_checkpoint(
    has_digest: bool, stopped: Path, tmp_path: Path, refused: Refused
) -> None:
    mark = tmp_path / "executed"
    explosive = pickle.dumps(Explosive(mark))
    digest = hashlib.sha256(explosive).digest() if has_digest else b""
    (stopped / CHECKPOINT).write_bytes(digest + explosive)
    assert f"{CHECKPOINT}' is damaged or was not written by" in refusal_to_resume(refused, stopped)
    assert not mark.exists()
    pickle.loads(explosive)
    assert mark.exists(), "the pickle would have left a mark"


def test_run_does_not_execute_a_pickle_in_place_of_a_policy_file(
    undisturbed: Path, tmp_path: Path, refused: Refused
) -> None:
    best = tmp_path / "best"
    shutil.copytree(undisturbed / "best", best)
    (best / "policy.safetensors").write_bytes(pickle.dumps(Explosive(tmp_path / "executed")))
    said = refused("run", "--task", "tiny", "--controller", "ppo", "--checkpoint", str(best))
    assert "policy.safetensors" in said
    assert not (tmp_path / "executed").exists()


# --- contents -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"iteration": -1}, "iteration"),
        ({"iteration": 1.5}, "iteration"),
        ({"best_return": "high"}, "best_return"),
        ({"skipped_in_a_row": None}, "skipped_in_a_row"),
        ({"settings": 3}, "settings"),
        ({"settings": {}}, "belongs to another run; different: "),
        ({"policy": {}}, "does not fit its run: Error(s) in loading state_dict"),
        ({"rows": {"update": [0, 5]}}, "does not fit its run: Expected `array`, got `object`"),
        ({"rows": [2, -1.0]}, "rows"),
        ({"rows": [9, 1.0]}, "lost rows since the checkpoint, which counts on those of iteration 9"),
        ({"rows": ...}, "missing required field `rows`"),
        ({"iteration": ...}, "missing required field `iteration`"),
    ],
)
def test_resume_refuses_invalid_values_in_a_checkpoint_even_with_a_valid_digest(
    changes: dict[str, Any], fragment: str, stopped: Path, refused: Refused
) -> None:
    state = {**read_checkpoint(stopped), **changes}
    write_checkpoint(stopped, {name: value for name, value in state.items() if value is not ...})
    assert fragment in refusal_to_resume(refused, stopped)


def test_resume_refuses_the_optimiser_state_of_another_network_even_with_a_valid_digest(
    stopped: Path, refused: Refused
) -> None:
    other = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))]).state_dict()
    write_checkpoint(stopped, {**read_checkpoint(stopped), "optimiser": other})
    assert "does not fit its run" in refusal_to_resume(refused, stopped)


def test_damaged_checkpoint_is_refused_or_loads_the_same_state_as_the_undamaged_one(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of_run(stopped)
    trainer = Trainer(task_of(config), config)
    monkeypatch.setattr(policy_training, "Trainer", lambda task, settings, journal: trainer)
    monkeypatch.setattr(Trainer, "__iter__", lambda trainer: iter(()))
    train(config, stopped, resume=True)
    good = state_of(trainer)
    file, rng = stopped / CHECKPOINT, random.Random(0)
    content = file.read_bytes()
    refusals = []
    for number in range(DAMAGED):
        file.write_bytes(damaged(content, rng, truncate=number % 4 == 0))
        forget(trainer)
        try:
            train(config, stopped, resume=True)
        except EsperError as error:
            refusals.append(str(error))
        else:
            assert state_of(trainer) == good, "a damaged checkpoint was loaded"
    assert len(refusals) > 0.75 * DAMAGED
    assert all(CHECKPOINT in refusal and "\n" not in refusal for refusal in refusals)


def damaged(content: bytes, rng: random.Random, *, truncate: bool) -> bytes:
    """Return the content of a file, truncated at a random position or with a single bit flipped."""
    if truncate:
        return content[: rng.randrange(len(content))]
    place = rng.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


def state_of(trainer: Trainer) -> Any:
    numbers = (trainer.iteration, trainer.best_return, trainer.agent.skipped_in_a_row)
    return bits([numbers, trainer.policy.state_dict(), trainer.agent.optimiser.state_dict()])


def forget(trainer: Trainer) -> None:
    trainer.iteration, trainer.best_return = -1, -1.0
    trainer.agent.optimiser.state.clear()
    with torch.no_grad():
        for parameter in trainer.policy.parameters():
            parameter.zero_()
