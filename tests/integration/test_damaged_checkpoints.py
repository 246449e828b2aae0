"""Damaged or manipulated runs: ``--resume`` refuses them and executes no code from their files."""

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
from esper.run.policy_training import task_of, train
from esper.run.train_checkpoint import STATE_FILES, config_of_run
from esper.scripts import cli
from esper.simic.training.trainer import Trainer
from esper.tamiyo.policy.checkpoint import save_tensors, seal
from tests.integration.training import Refused, assert_same_end, everything_in, tiny
from tests.tolaria.building import bits

pytestmark = pytest.mark.usefixtures("cache")
DAMAGED = 80
"""Number of damaged checkpoint files to load: each is truncated or has one flipped bit."""


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
        shutil.rmtree(stopped / "checkpoints")
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
    shutil.rmtree(stopped / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", stopped / "checkpoints")
    assert "belongs to another run; different: rng_seed" in refusal_to_resume(refused, stopped)


def test_resume_of_a_run_with_an_older_telemetry_schema_is_refused_with_the_schema_version(
    tmp_path: Path, refused: Refused
) -> None:
    """The error message names the schema version, and none of the settings that were renamed since that
    version."""
    shutil.copytree(Path(__file__).parents[1] / "old_run", tmp_path / "run")
    said = refusal_to_resume(refused, tmp_path / "run")
    assert "was written with version 2 of the tables; this version of esper reads 4: use the version" in said


# --- pointers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../../outside", "/etc", "iteration-00002/../../../outside", "iteration-2", "", "iteration-00002\0"],
)
def test_resume_refuses_a_checkpoint_pointer_to_a_folder_outside_the_run(
    name: str, stopped: Path, refused: Refused
) -> None:
    shutil.copytree(stopped / "checkpoints" / "iteration-00002", stopped.parent / "outside")
    (stopped / "checkpoints" / "latest").write_text(name)
    said = refusal_to_resume(refused, stopped)
    assert f"latest' must name a state such as iteration-00005; found {name!r}" in said


def test_resume_refuses_a_checkpoint_pointer_to_a_missing_folder_but_works_without_a_pointer(
    undisturbed: Path, stopped: Path, refused: Refused
) -> None:
    (stopped / "checkpoints" / "latest").write_text("iteration-00009")
    assert "iteration-00009' holds no checkpoint" in refusal_to_resume(refused, stopped)
    (stopped / "checkpoints" / "latest").unlink()
    # Without the pointer file ``latest``, training resumes from the newest complete checkpoint.
    cli.main(["train", "--resume", str(stopped)])
    assert_same_end(undisturbed, stopped)


# --- pickles --------------------------------------------------------------------------------------


class Explosive:
    """Object that creates a file when the object is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("file", STATE_FILES)
@pytest.mark.parametrize("sealed", [True, False])
def test_resume_does_not_execute_a_pickle_in_place_of_a_checkpoint_file(
    file: str, sealed: bool, stopped: Path, tmp_path: Path, refused: Refused
) -> None:
    state, mark = stopped / "checkpoints" / "iteration-00002", tmp_path / "executed"
    (state / file).write_bytes(pickle.dumps(Explosive(mark)))
    if sealed:
        seal(state, STATE_FILES)
    assert file in refusal_to_resume(refused, stopped)
    assert not mark.exists()
    pickle.loads((state / file).read_bytes())
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
        ({"iteration": 1}, "holds the state of iteration 1"),
        ({"best_return": "high"}, "best_return"),
        ({"skipped_in_a_row": None}, "skipped_in_a_row"),
        ({"config": 3}, "config"),
        ({"config": {}}, "belongs to another run; different: "),
        ({"telemetry": {"update": [0, 5]}}, "no checkpoint of this version: Expected `array`, got `object`"),
        ({"telemetry": [2, -1.0]}, "telemetry"),
        ({"telemetry": [9, 1.0]}, "lost rows since the checkpoint, which counts on those of iteration 9"),
        ({"telemetry": ...}, "missing required field `telemetry`"),
        ({"iteration": ...}, "missing required field `iteration`"),
    ],
)
def test_resume_refuses_invalid_values_in_progress_json_even_with_a_valid_seal(
    changes: dict[str, Any], fragment: str, stopped: Path, refused: Refused
) -> None:
    state = stopped / "checkpoints" / "iteration-00002"
    progress = {**json.loads((state / "progress.json").read_text()), **changes}
    kept = {name: value for name, value in progress.items() if value is not ...}
    (state / "progress.json").write_text(json.dumps(kept))
    assert "progress.json' is not as it was written" in refusal_to_resume(refused, stopped)
    seal(state, STATE_FILES)
    assert fragment in refusal_to_resume(refused, stopped)


def test_resume_refuses_the_optimiser_state_of_another_network_even_with_a_valid_seal(
    stopped: Path, refused: Refused
) -> None:
    state = stopped / "checkpoints" / "iteration-00002"
    (state / "optimiser.safetensors").write_bytes(save_tensors({"heads.exp_avg": torch.zeros(3)}))
    assert "optimiser.safetensors' is not as it was written" in refusal_to_resume(refused, stopped)
    seal(state, STATE_FILES)
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
    files = sorted(path for path in (stopped / "checkpoints").rglob("*") if path.is_file())
    rng = random.Random(0)
    refusals = []
    for number in range(DAMAGED):
        file = files[number % len(files)]
        content = file.read_bytes()
        file.write_bytes(damaged(content, rng, truncate=number % 4 == 0))
        forget(trainer)
        try:
            train(config, stopped, resume=True)
        except EsperError as error:
            refusals.append(str(error))
        else:
            assert state_of(trainer) == good, f"{file.name} was damaged and loaded"
        file.write_bytes(content)
    assert len(refusals) > 0.75 * DAMAGED
    assert all("checkpoints" in refusal and "\n" not in refusal for refusal in refusals)


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
