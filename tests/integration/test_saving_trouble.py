"""Interrupted trainings and full disks: earlier checkpoints are intact and can be resumed."""

import json
import os
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from esper.karn.run import read_rows
from esper.leyline.rows import UpdateRow
from esper.run.policy_training import train
from esper.scripts import cli
from esper.simic.agent.ppo import PolicyDivergedError
from esper.simic.training.trainer import Iteration, Trainer
from esper.tamiyo.policy import checkpoint
from esper.tamiyo.policy.checkpoint import load_policy, seal
from tests.integration.training import (
    StoppedError,
    after_iterations,
    assert_same_end,
    everything_in,
    files_below,
    full_disk,
    sentence_from,
    tiny,
)

pytestmark = pytest.mark.usefixtures("cache")


def test_an_interrupted_training_prints_the_command_to_resume(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(trainer: Trainer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "run_iteration", interrupt)
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--resume", str(stopped)])
    assert stop.value.code == 130
    assert f"esper train --resume {stopped}" in capsys.readouterr().err


def test_a_training_that_diverges_right_after_a_checkpoint_keeps_that_checkpoint(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, run_iteration, kept = tmp_path / "run", Trainer.run_iteration, {}

    def diverge(trainer: Trainer) -> Iteration:
        if trainer.iteration < 2:
            return run_iteration(trainer)
        kept.update(everything_in(out / "checkpoints"))
        raise PolicyDivergedError("three updates in a row")

    def check_the_last(*args: object) -> None:
        assert everything_in(out / "checkpoints").items() >= kept.items()

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run_iteration", diverge)
        patch.setattr(checkpoint, "seal", lambda state, names: (check_the_last(), seal(state, names)))
        with pytest.raises(PolicyDivergedError):
            train(tiny(), out)
    assert (out / "checkpoints" / "latest").read_text() == "iteration-00002-again"
    cli.main(["train", "--resume", str(out)])
    assert_same_end(undisturbed, out)


# --- full disk ------------------------------------------------------------------------------------


def without_room(out: Path, file: str, after: int) -> AbstractContextManager[None]:
    """Make one write to ``file`` fail after the rows of iteration ``after``."""

    def fill_the_disk(iteration: int) -> None:
        if iteration == after:
            partial = out / f"{file}.partial"
            partial.parent.mkdir(exist_ok=True)
            # Writes to /dev/full fail like writes to a full disk.
            partial.symlink_to("/dev/full")

    return after_iterations(fill_the_disk)


SAVED = [
    "checkpoints/iteration-0000{}/policy.safetensors",
    "checkpoints/iteration-0000{}/optimiser.safetensors",
    "checkpoints/iteration-0000{}/seal.json",
    "checkpoints/latest",
]


@pytest.mark.parametrize("saved", SAVED)
def test_a_full_disk_does_not_end_a_training(
    saved: str, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = tmp_path / "run", saved.format(2)
    kept = []

    def look(iteration: int) -> None:
        if iteration == 3:
            kept.append((out / "checkpoints" / "latest").read_text())

    with without_room(out, file, 2), after_iterations(look):
        train(tiny(), out)
    assert capsys.readouterr().err == (
        f"esper: '{out / file}' cannot be written: No space left on device; what was saved before is intact,"
        " and the training continues\n"
    )
    assert kept == ["iteration-00001"]
    assert not list(out.rglob("*.partial"))
    assert_same_end(undisturbed, out)


@pytest.mark.parametrize("saved", SAVED)
def test_a_training_whose_last_checkpoint_cannot_be_saved_can_be_resumed(
    saved: str, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = tmp_path / "run", saved.format(3)
    with without_room(out, file, 3):
        said = sentence_from(capsys, lambda: train(tiny(), out))
    assert (
        f"'{out / file}' cannot be written: No space left on device; what was saved before is intact" in said
    )
    assert f"esper train --resume {out}" in said
    assert (out / "checkpoints" / "latest").read_text() == "iteration-00002"
    assert not list(out.rglob("*.partial"))
    cli.main(["train", "--resume", str(out)])
    assert_same_end(undisturbed, out)


@pytest.mark.parametrize("name", ["policy.json", "policy.safetensors"])
def test_the_best_return_is_that_of_the_last_policy_saved_as_best(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with without_room(out, f"best/{name}", 2):
        train(tiny(), out)
    assert f"'{out / 'best' / name}' cannot be written" in capsys.readouterr().err
    first, second, _ = (row.evaluation_return for row in read_rows(out, UpdateRow))
    assert first is not None
    assert second is not None
    assert second > first
    progress = json.loads((out / "checkpoints" / "iteration-00003" / "progress.json").read_text())
    assert progress["best_return"] == first
    load_policy(out / "best")


def test_a_full_disk_at_fsync_ends_a_training_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "fsync", full_disk)
    said = sentence_from(capsys, lambda: train(tiny(), tmp_path / "run"))
    assert "config.json' cannot be written: No space left on device" in said
    assert not list(tmp_path.rglob("*.partial"))


def test_a_training_continues_and_can_be_resumed_when_rows_cannot_be_written(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"

    def stop(iteration: int) -> None:
        if iteration == 3:
            raise StoppedError

    no_room = without_room(out, "telemetry/rows-00002.jsonl", 1)
    with no_room, after_iterations(stop), pytest.raises(StoppedError):
        train(tiny(), out)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("esper: telemetry stopped: cannot write")
    assert "(No space left on device); the run goes on, its further rows are lost" in said
    assert [row.iteration for row in read_rows(out, UpdateRow)] == [1]
    cli.main(["train", "--resume", str(out)])
    assert [row.iteration for row in read_rows(out, UpdateRow)] == [1, 3]
    assert files_below(out / "checkpoints") == files_below(undisturbed / "checkpoints")
    assert files_below(out / "best") == files_below(undisturbed / "best")
