"""Runs that end early, for a full disk or otherwise: what was saved is intact, and can be resumed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from esper import run_state
from esper.nissa.part import TablePart
from esper.scripts import cli
from esper.simic.agent.ppo import PolicyDivergedError
from esper.simic.training.vectorized import RoundSummary, Trainer
from esper.tamiyo.policy.checkpoint import load_policy, seal
from esper.teaching import teach
from tests.integration.training import assert_same_end, everything_in, full_disk, sentence_from, tiny

pytestmark = pytest.mark.usefixtures("cache")


def test_a_run_is_resumed_from_its_last_checkpoint(undisturbed: Path, stopped: Path) -> None:
    cli.main(["train", "--resume", str(stopped)])
    assert_same_end(undisturbed, stopped)


def test_an_interrupted_run_says_how_to_go_on(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(trainer: Trainer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "run_round", interrupt)
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--resume", str(stopped)])
    assert stop.value.code == 130
    assert f"esper train --resume {stopped}" in capsys.readouterr().err


def test_a_run_that_ends_in_the_round_after_a_checkpoint_leaves_that_one_alone(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, run_round, kept = tmp_path / "run", Trainer.run_round, {}

    def diverge(trainer: Trainer) -> RoundSummary:
        if trainer.round < 2:
            return run_round(trainer)
        kept.update(everything_in(out / "checkpoints"))
        raise PolicyDivergedError("three updates in a row")

    def check_the_last(*args: object) -> None:
        assert everything_in(out / "checkpoints").items() >= kept.items()

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run_round", diverge)
        patch.setattr(run_state, "seal", lambda state, names: (check_the_last(), seal(state, names)))
        with pytest.raises(PolicyDivergedError):
            teach(tiny(), out)
    assert (out / "checkpoints" / "latest").read_text() == "round-00002-again"
    cli.main(["train", "--resume", str(out)])
    assert_same_end(undisturbed, out)


# --- a full disk ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file",
    [
        "best/policy.json",
        "best/policy.safetensors",
        "checkpoints/round-00002/policy.safetensors",
        "checkpoints/round-00002/optimiser.safetensors",
        "checkpoints/round-00002/seal.json",
        "checkpoints/latest",
    ],
)
def test_a_full_disk_ends_a_run_that_can_be_resumed(
    file: str, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"

    def fill_the_disk(summary: RoundSummary) -> None:
        if summary.round == 2:
            partial = out / f"{file}.partial"
            partial.parent.mkdir(exist_ok=True)
            partial.symlink_to("/dev/full")  # takes no byte

    said = sentence_from(capsys, lambda: teach(tiny(), out, on_round=fill_the_disk))
    assert (
        f"'{out / file}' cannot be written: No space left on device; what was saved before is intact" in said
    )
    assert f"esper train --resume {out}" in said
    assert (out / "checkpoints" / "latest").read_text() == "round-00001"
    assert not list(out.rglob("*.partial"))
    load_policy(out / "best")
    cli.main(["train", "--resume", str(out)])
    assert_same_end(undisturbed, out)


def test_a_disk_that_is_full_when_it_is_flushed_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "fsync", full_disk)
    said = sentence_from(capsys, lambda: teach(tiny(), tmp_path / "run"))
    assert "config.json' cannot be written: No space left on device" in said
    assert not list(tmp_path.rglob("*.partial"))


def test_rows_that_cannot_be_written_end_a_run_that_can_be_resumed(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    write_out = TablePart.write_out

    def half_of_a_row(part: TablePart) -> None:
        if part._buffer and b'"round":2' in part._buffer:
            del part._buffer[20:]
            write_out(part)
            full_disk()
        write_out(part)

    with monkeypatch.context() as patch:
        patch.setattr(TablePart, "write_out", half_of_a_row)
        said = sentence_from(capsys, lambda: teach(tiny(), out))
    assert "No space left on device" in said
    assert f"esper train --resume {out}" in said
    cli.main(["train", "--resume", str(out)])
    assert_same_end(undisturbed, out)
