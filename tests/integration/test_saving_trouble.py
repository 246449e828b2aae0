"""Interrupted trainings and full disks: earlier checkpoints stay intact, and the training can be resumed."""

import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from esper.files.atomic_write import SaveError
from esper.karn.run import read_rows
from esper.leyline.rows import UpdateRow
from esper.run.checkpoint_file import CHECKPOINT, read_checkpoint
from esper.run.policy_training import train
from esper.scripts import cli
from esper.scripts.train_command import interrupted
from esper.simic.agent.ppo import PolicyDivergedError
from esper.simic.training.trainer import Iteration, Trainer
from esper.tamiyo.policy.checkpoint import POLICY_FILE, load_policy
from tests.integration.training import (
    StoppedError,
    after_iterations,
    assert_same_end,
    checkpoint_in,
    full_disk,
    sentence_from,
    tiny,
)

pytestmark = pytest.mark.usefixtures("cache")


def test_interrupted_training_prints_the_command_that_resumes_it(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(trainer: Trainer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "run_iteration", interrupt)
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--resume", str(stopped)])
    assert stop.value.code == 130
    assert f"esper train --resume {stopped}" in capsys.readouterr().err


def test_training_that_diverges_right_after_a_checkpoint_does_not_change_that_checkpoint(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, run_iteration, kept = tmp_path / "run", Trainer.run_iteration, list[object]()

    def diverge(trainer: Trainer) -> Iteration:
        if trainer.iteration < 2:
            return run_iteration(trainer)
        kept.append(checkpoint_in(out))
        raise PolicyDivergedError("three updates in a row")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run_iteration", diverge)
        with pytest.raises(PolicyDivergedError):
            train(tiny(), out)
    assert kept == [checkpoint_in(out)]
    cli.main(["train", "--resume", str(out)])
    assert_same_end(undisturbed, out)


# --- full disk ------------------------------------------------------------------------------------


def without_room(out: Path, file: str, after: int) -> AbstractContextManager[None]:
    """Make one write to ``file`` fail as on a full disk, after the telemetry rows of iteration ``after`` were
    written."""
    replace = os.replace

    def fill_the_disk(iteration: int) -> None:
        if iteration == after:
            os.replace = refuse_once

    def refuse_once(partial: Path, path: Path) -> None:
        if path != out / file:
            return replace(partial, path)
        os.replace = replace
        return full_disk()

    return after_iterations(fill_the_disk)


def test_training_continues_if_a_checkpoint_cannot_be_written_to_a_full_disk(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = tmp_path / "run", CHECKPOINT
    kept = []

    def look(iteration: int) -> None:
        if iteration == 3:
            kept.append(read_checkpoint(out)["iteration"])

    with without_room(out, file, 2), after_iterations(look):
        train(tiny(), out)
    assert capsys.readouterr().err == (
        f"esper: '{out / file}' cannot be written: No space left on device; what was saved before is intact,"
        " and the run continues\n"
    )
    assert kept == [1]
    assert not list(out.rglob("*.partial"))
    assert_same_end(undisturbed, out)


def test_training_whose_last_checkpoint_cannot_be_written_can_be_resumed(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = tmp_path / "run", CHECKPOINT
    with without_room(out, file, 3), pytest.raises(SaveError) as error:
        train(tiny(), out)
    assert str(error.value) == (
        f"the run is over, but not complete on disk: '{out / file}' cannot be written: No space left on"
        f" device: make room, then go on with esper train --resume {out}"
    )
    assert "what was saved before is intact, and the run continues" in capsys.readouterr().err
    assert read_checkpoint(out)["iteration"] == 2
    assert not list(out.rglob("*.partial"))
    cli.main(["train", "--resume", str(out)])
    assert_same_end(undisturbed, out)


def test_best_policy_that_did_not_fit_on_a_full_disk_is_saved_at_the_second_try(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with without_room(out, f"best/{POLICY_FILE}", 2):
        train(tiny(), out)
    assert f"'{out / 'best' / POLICY_FILE}' cannot be written" in capsys.readouterr().err
    assert_same_end(undisturbed, out)


def test_best_policy_that_cannot_be_written_ends_the_training_with_an_error(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def block(iteration: int) -> None:
        if iteration == 1:
            (out / "best").write_text("in the way")

    with after_iterations(block), pytest.raises(SaveError, match=r"best/policy.\w+' cannot be written"):
        train(tiny(), out)
    assert read_checkpoint(out)["best_return"] is None


def test_training_ends_with_a_one_sentence_error_if_fsync_fails_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "fsync", full_disk)
    said = sentence_from(capsys, lambda: train(tiny(), tmp_path / "run"))
    assert "run' cannot be written: No space left on device; choose another one" in said
    assert not list(tmp_path.rglob("*.partial"))


def test_rows_that_did_not_fit_on_a_full_disk_are_written_before_the_checkpoint_that_counts_on_them(
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
    assert "rows-00002.jsonl' cannot be written: No space left on device; what was saved before" in said
    assert [row.iteration for row in read_rows(out, UpdateRow)] == [1, 2, 3]
    cli.main(["train", "--resume", str(out)])
    assert_same_end(undisturbed, out)


def test_training_whose_directory_was_deleted_ends_with_an_error_and_saves_the_policy(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def delete(iteration: int) -> None:
        if iteration == 1:
            shutil.rmtree(out)

    with after_iterations(delete), pytest.raises(SaveError, match=r"written: No such file or directory"):
        train(tiny(), out)
    load_policy(out / "best")


@pytest.mark.parametrize(
    ("left", "words"),
    [
        ((), "interrupted before anything was saved; run the same command again"),
        (
            ("config.json",),
            "go on from the beginning, as there is no checkpoint yet, with esper train --resume",
        ),
        (("config.json", CHECKPOINT), "go on from the last checkpoint with esper train --resume"),
    ],
)
def test_sentence_after_an_interrupt_names_what_can_be_resumed(
    left: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    for name in left:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert words in str(interrupted(tmp_path))
