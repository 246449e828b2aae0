"""A process that writes for ever, to be killed: ``endless_writer.py RUN [MOMENT]``.

It says how many rows are flushed. A resumable one stores its checkpoint in ``RUN.json`` and goes on from it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from esper.leyline.durable import write_durably
from esper.leyline.run_files import RowMark
from esper.nissa import compaction
from esper.nissa import writer as writer_module
from esper.nissa.writer import RunWriter
from tests.karn import fake_run

BATCH = 200
CHECKPOINT_BATCHES = 5
writer_module.LINES_BYTES = 400_000  # type: ignore[misc]
"""About 800 rows: four batches."""


class Checkpoint(msgspec.Struct):
    rows: int
    mark: RowMark


def kill(*_: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody survives this")


def before(owner: Any, name: str) -> None:
    setattr(owner, name, kill)


def after(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    def hooked(*args: Any) -> None:
        original(*args)
        kill()

    setattr(owner, name, hooked)


def half_way_through_parquet() -> None:
    original = compaction.Compactor._copy

    def torn(self: compaction.Compactor, lines: Sequence[bytes], table: str, folder: Path) -> None:
        original(self, lines, table, folder)
        file = folder / f"{table}.parquet"
        os.truncate(file, file.stat().st_size // 2)
        kill()

    compaction.Compactor._copy = torn  # type: ignore[method-assign]


def before_the_last_lines_go() -> None:
    original = compaction.remove

    def hooked(path: Path) -> None:
        if path.name == "rows-00004.jsonl" or "write" in sys.argv:
            kill()
        original(path)

    compaction.remove = hooked


MOMENTS: dict[str, Callable[[], None]] = {
    "before Parquet is written": lambda: before(compaction.Compactor, "_copy"),
    "half way through Parquet": half_way_through_parquet,
    "before Parquet gets its name": lambda: before(compaction, "name_folder"),
    "after Parquet got its name": lambda: after(compaction, "name_folder"),
    "before the last lines are removed": before_the_last_lines_go,
}


def say(rows: int) -> None:
    sys.stdout.write(f"{rows}\n")
    sys.stdout.flush()


def emit_batch(writer: RunWriter, start: int) -> int:
    for number in range(start, start + BATCH):
        writer.emit(fake_run.policy_decision_row(number))
    return start + BATCH


def write_for_ever(run: Path) -> None:
    writer, rows = RunWriter(run), 0
    while True:
        rows = emit_batch(writer, rows)
        writer.flush()
        say(rows)


def resume_for_ever(run: Path) -> None:
    """An iteration is a batch; every five there is a checkpoint."""
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


if __name__ == "__main__":
    kind, directory, *moment = sys.argv[1:]
    for name in moment:
        MOMENTS[name]()
    {"write": write_for_ever, "resume": resume_for_ever}[kind](Path(directory))
