"""Telemetry writers in separate processes that write rows until the process is killed.

After each flush, a writer process sends the number of flushed rows to the test. A writer process of kind
"resume" stores its checkpoint in ``RUN.json``.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from esper.files.atomic_write import write_durably
from esper.files.row_files import RowMark
from esper.nissa import compaction
from esper.nissa import writer as writer_module
from esper.nissa.writer import RunWriter
from tests.karn import fake_run

BATCH = 200
CHECKPOINT_BATCHES = 5
LINES_BYTES = 400_000
"""Size in bytes above which a JSON Lines file is compacted to Parquet; 400 kB are about 800 rows."""


class Checkpoint(msgspec.Struct):
    rows: int
    mark: RowMark


# --- points at which the process kills itself -------------------------------------------------------


def kill(*_: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable after SIGKILL")


def before(owner: Any, name: str) -> None:
    setattr(owner, name, kill)


def after(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    def hooked(*args: Any) -> None:
        original(*args)
        kill()

    setattr(owner, name, hooked)


def half_way_through_parquet() -> None:
    original = compaction._copy

    def torn(database: Any, lines: Sequence[bytes], table: str, folder: Path) -> None:
        original(database, lines, table, folder)
        file = folder / f"{table}.parquet"
        os.truncate(file, file.stat().st_size // 2)
        kill()

    compaction._copy = torn


def before_the_last_lines_go() -> None:
    original = compaction.remove

    def hooked(path: Path) -> None:
        # The last file that compaction removes is rows-00004.jsonl in a run with iterations, and
        # rows-00000.jsonl in a run without iterations.
        if path.name in ("rows-00004.jsonl", "rows-00000.jsonl"):
            kill()
        original(path)

    compaction.remove = hooked


MOMENTS: dict[str, Callable[[], None]] = {
    "before Parquet is written": lambda: before(compaction, "_copy"),
    "half way through Parquet": half_way_through_parquet,
    "before Parquet gets its name": lambda: before(compaction, "name_folder"),
    "after Parquet got its name": lambda: after(compaction, "name_folder"),
    "before the last lines are removed": before_the_last_lines_go,
}


# --- child process ----------------------------------------------------------------------------------


def emit_batch(writer: RunWriter, start: int) -> int:
    for number in range(start, start + BATCH):
        writer.emit(fake_run.policy_decision_row(number))
    return start + BATCH


def write_for_ever(run: Path, say: Callable[[int], None]) -> None:
    writer, rows = RunWriter(run), 0
    while True:
        rows = emit_batch(writer, rows)
        writer.flush()
        say(rows)


def resume_for_ever(run: Path, say: Callable[[int], None]) -> None:
    """Write one batch of telemetry rows per iteration, with a checkpoint every five iterations."""
    stored = run.with_suffix(".json")
    checkpoint = Checkpoint(0, RowMark(0, 0.0))
    if stored.exists():
        checkpoint = msgspec.json.decode(stored.read_bytes(), type=Checkpoint)
    resume_from = checkpoint.mark if (run / "telemetry").exists() else None
    writer, rows = RunWriter(run, resume_from=resume_from), checkpoint.rows
    say(rows)
    while True:
        for _ in range(CHECKPOINT_BATCHES):
            with writer.iteration(rows // BATCH + 1):
                rows = emit_batch(writer, rows)
            say(rows)
        with writer.checkpoint() as mark:
            write_durably(stored, msgspec.json.encode(Checkpoint(rows, mark)))


def work(kind: str, run: Path, moment: str | None, output: Connection) -> None:
    writer_module.LINES_BYTES = LINES_BYTES  # type: ignore[misc]
    if moment is not None:
        MOMENTS[moment]()
    {"write": write_for_ever, "resume": resume_for_ever}[kind](run, output.send)


# --- parent process ---------------------------------------------------------------------------------


class Writer:
    """Child process that writes telemetry, forked from a server process that has imported all modules."""

    def __init__(self, kind: str, run: Path, moment: str | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["pytest", __name__])
        self.output, sender = context.Pipe(duplex=False)
        root = str(Path(__file__).parents[2])
        # The fork server reads PYTHONPATH when it imports its modules.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", f"{root}/src:{root}")
            self.process = context.Process(target=work, args=(kind, run, moment, sender), daemon=True)
            self.process.start()
        sender.close()

    def kill_after(self, seconds: float) -> int:
        """Kill the writer process ``seconds`` after its first output; return the number of flushed rows."""
        first = self.output.recv()
        time.sleep(seconds)
        self.process.kill()
        return max(first, self.last_output())

    def last_output(self) -> int:
        """Return the last number of flushed rows that the writer process sent."""
        rows = 0
        try:
            while True:
                rows = self.output.recv()
        except EOFError:
            self.process.join()
            assert self.process.exitcode == -signal.SIGKILL
            return rows
