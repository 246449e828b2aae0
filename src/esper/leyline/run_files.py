"""The files of a run's telemetry: what the writer leaves and every reader looks for.

``DIR/telemetry/<table>/part-00000.jsonl, part-00001.jsonl, …``: rows in the order in which they came.
A part that is closed becomes ``part-NNNNN.parquet``; while both are there they hold the same rows.
The writer holds a lock on ``DIR/telemetry/writer.lock`` as long as it episodes.

A training writes its tables iteration by iteration. Until then the rows of an iteration stand in
``DIR/telemetry/journals/iteration-NNNNN-env-NNNN.rows``, one file per shard of environments, each line the
name of a table, a tab and a row. ``written.json`` beside them says which iterations the tables hold.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from esper.leyline.errors import UNREADABLE, EsperError

TELEMETRY: Final = "telemetry"
LOCK_FILE: Final = "writer.lock"
JOURNALS: Final = "journals"
WRITTEN_FILE: Final = "written.json"
PartKind = Literal["jsonl", "parquet"]
_PART: Final = re.compile(r"part-([0-9]{5,})\.(jsonl|parquet)")
_JOURNAL: Final = re.compile(r"iteration-([0-9]{5,})-env-[0-9]{4,}\.rows")


class PartSize(NamedTuple):
    """How far a table was written: the number of its open part, the bytes in it, the time of its last row."""

    part: Annotated[int, msgspec.Meta(ge=0)]
    bytes: Annotated[int, msgspec.Meta(ge=0)]
    t: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class Written(msgspec.Struct):
    """How far the iterations of a training stand in the tables."""

    iteration: Annotated[int, msgspec.Meta(ge=1)]
    sizes: dict[str, PartSize] | None
    """None: this iteration does, as all before. Else it is being added behind these sizes."""


def part_path(folder: Path, number: int, kind: PartKind) -> Path:
    """Where a part of the table in ``folder`` is found."""
    return folder / f"part-{number:05d}.{kind}"


def part_files(folder: Path) -> list[tuple[int, Path]]:
    """The files in the folder of a table with the numbers of their parts, in order; Parquet comes last."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted((int(match[1]), folder / name) for name in names if (match := _PART.fullmatch(name)))


def list_parts(folder: Path) -> dict[int, Path]:
    """The parts of the table in ``folder`` by number, in order; Parquet where a part is there as both.

    While a writer works, one look may miss a part that turns into Parquet meanwhile; two equal ones do not.
    """
    found = dict(part_files(folder))
    while found != (again := dict(part_files(folder))):
        found = again
    if list(found) != list(range(len(found))):
        missing = next(number for number in range(len(found)) if number not in found)
        raise EsperError(f"'{folder}' is damaged: part {missing} is gone and later ones are there")
    return found


def journal_path(telemetry: Path, number: int, env: int) -> Path:
    """Where the rows of an iteration are kept that the shard of environments from ``env`` on episodes."""
    return telemetry / JOURNALS / f"iteration-{number:05d}-env-{env:04d}.rows"


def journal_files(telemetry: Path) -> list[tuple[int, Path]]:
    """All journals with their iterations, in the order of iterations and environments."""
    folder = telemetry / JOURNALS
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted((int(match[1]), folder / name) for name in names if (match := _JOURNAL.fullmatch(name)))


def read_written(telemetry: Path) -> Written | None:
    """How far the tables were written; None: no iteration yet, or nothing is trained here."""
    path = telemetry / JOURNALS / WRITTEN_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Written)
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        raise EsperError(f"'{path}' is damaged: {error}") from None


def is_being_written(telemetry: Path) -> bool:
    """Whether a living writer holds the lock; the kernel takes it from a dead one."""
    try:
        file = os.open(telemetry / LOCK_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
