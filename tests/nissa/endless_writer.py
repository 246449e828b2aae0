"""A process that writes for ever, to be killed: ``endless_writer.py RUN [MOMENT]``.

It says how many rows are flushed. A resumable one stores its checkpoint in ``RUN.json`` and goes on from it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from esper.leyline.run_files import PartSize
from esper.nissa import compaction
from esper.nissa import writer as writer_module
from esper.nissa.writer import RunWriter
from tests.karn import fake_run

BATCH = 200
CHECKPOINT_BATCHES = 5
writer_module.PART_BYTES = 400_000
"""About 800 rows: four batches."""


class Checkpoint(msgspec.Struct):
    rows: int
    sizes: dict[str, PartSize]


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

    def torn(self: compaction.Compactor, lines: Path, table: str, partial: Path) -> int:
        original(self, lines, table, partial)
        os.truncate(partial, partial.stat().st_size // 2)
        kill()

    compaction.Compactor._copy = torn  # type: ignore[method-assign]


MOMENTS: dict[str, Callable[[], None]] = {
    "before Parquet is written": lambda: before(compaction.Compactor, "_copy"),
    "half way through Parquet": half_way_through_parquet,
    "before Parquet gets its name": lambda: before(os, "replace"),
    "after Parquet got its name": lambda: after(os, "replace"),
    "before the lines are removed": lambda: before(Path, "unlink"),
}


def say(rows: int) -> None:
    sys.stdout.write(f"{rows}\n")
    sys.stdout.flush()


def write(writer: RunWriter, start: int) -> int:
    for number in range(start, start + BATCH):
        writer.emit(fake_run.policy_decision_row(number))
    writer.flush()
    say(start + BATCH)
    return start + BATCH


def write_for_ever(run: Path) -> None:
    writer, rows = RunWriter(run), 0
    while True:
        rows = write(writer, rows)


def resume_for_ever(run: Path) -> None:
    stored = run.with_suffix(".json")
    checkpoint = Checkpoint(0, {})
    if stored.exists():
        checkpoint = msgspec.json.decode(stored.read_bytes(), type=Checkpoint)
    resume_from = checkpoint.sizes if (run / "telemetry").exists() else None
    writer, rows = RunWriter(run, resumable=True, resume_from=resume_from), checkpoint.rows
    say(rows)
    while True:
        for _ in range(CHECKPOINT_BATCHES):
            rows = write(writer, rows)
        with writer.checkpoint() as sizes:
            partial = stored.with_suffix(".new")
            partial.write_bytes(msgspec.json.encode(Checkpoint(rows, sizes)))
            os.rename(partial, stored)


if __name__ == "__main__":
    kind, directory, *moment = sys.argv[1:]
    for name in moment:
        MOMENTS[name]()
    {"write": write_for_ever, "resume": resume_for_ever}[kind](Path(directory))
