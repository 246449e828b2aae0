"""Parts of a training close at its checkpoints and become Parquet; killed meanwhile, it still resumes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from esper.karn.query import read_rows
from esper.leyline.events import TABLES
from esper.nissa import compaction
from esper.nissa import writer as writer_module
from esper.nissa.lock import WriterLock
from esper.run_state import CONFIG_FILE
from esper.scripts import cli
from esper.training import train
from tests.integration.training import MACHINE_RULES, TIMES, prepare, sentence_of, tiny

PART_BYTES = 1_000
"""About two iterations of updates."""
MOMENTS: dict[str, tuple[Any, str]] = {
    "before a checkpoint's parts are converted": (writer_module.RunWriter, "_compact"),
    "before Parquet is written": (compaction.Compactor, "_copy"),
    "before the lines are removed": (Path, "unlink"),
}


def rows_without_times(run: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        table: [
            {
                name: getattr(row, name)
                for name in row.__struct_fields__
                if name not in {*TIMES, "ms", "phase_ms"}
            }
            for row in read_rows(run, table)
            if getattr(row, "rule", None) not in MACHINE_RULES
        ]
        for table in TABLES
        if table != "resource"
    }


def kill(*_: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody survives this")


def run_to_be_killed(cache: Path, moment: str, run: Path) -> None:
    prepare(cache)
    writer_module.PART_BYTES = PART_BYTES  # type: ignore[misc]
    owner, name = MOMENTS[moment]
    if name == "unlink":
        original: Callable[..., None] = Path.unlink

        def only_lines(path: Path, *args: Any, **options: Any) -> None:
            if path.suffix == ".jsonl":
                kill()
            original(path, *args, **options)

        Path.unlink = only_lines  # type: ignore[method-assign, assignment]
    else:
        setattr(owner, name, kill)
    train(tiny(iterations=4), run)


@pytest.fixture(scope="module")
def undisturbed_parts(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("parts") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module, "PART_BYTES", PART_BYTES)
        train(tiny(iterations=4), out)
    return out


def test_the_rows_are_those_of_a_run_without_parts(
    undisturbed_parts: Path, cache: Path, tmp_path: Path
) -> None:
    train(tiny(iterations=4), tmp_path / "run")

    assert len(list((undisturbed_parts / "telemetry" / "update").glob("*.parquet"))) >= 2
    assert not list((tmp_path / "run" / "telemetry").rglob("*.parquet"))
    assert rows_without_times(undisturbed_parts) == rows_without_times(tmp_path / "run")


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_training_killed_while_parts_are_converted_resumes_to_the_same_end(
    moment: str, undisturbed_parts: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["esper.scripts.train_command", "torch._dynamo"])
    child = context.Process(target=run_to_be_killed, args=(cache, moment, out))
    child.start()
    child.join(timeout=120)
    assert child.exitcode == -signal.SIGKILL, f"the moment never came: exit code {child.exitcode}"
    assert (out / CONFIG_FILE).exists()

    monkeypatch.setattr(writer_module, "PART_BYTES", PART_BYTES)
    cli.main(["train", "--resume", str(out)])

    assert rows_without_times(out) == rows_without_times(undisturbed_parts)


def test_a_part_that_was_converted_after_the_checkpoint_is_refused(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compaction.Compactor().compact(stopped / "telemetry" / "update", "update", below=1)

    said = sentence_of(capsys, "train", "--resume", str(stopped))
    assert "part-00000.parquet' is newer than the checkpoint; a closed part cannot be cut" in said


def test_two_resumes_at_once_are_one_too_many(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = WriterLock(stopped / "telemetry")
    said = sentence_of(capsys, "train", "--resume", str(stopped))
    lock.release()
    assert "is being written by another process; let it finish, or stop it" in said
