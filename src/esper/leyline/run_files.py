"""The files of a run's telemetry: what the writer leaves and every reader looks for.

``DIR/telemetry/<table>/part-00000.jsonl, part-00001.jsonl, …``: rows in the order in which they came.
A part that is closed becomes ``part-NNNNN.parquet``; while both are there they hold the same rows.
The writer holds a lock on ``DIR/telemetry/writer.lock`` as long as it lives.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from esper.leyline.errors import EsperError

TELEMETRY: Final = "telemetry"
LOCK_FILE: Final = "writer.lock"
PartKind = Literal["jsonl", "parquet"]
_PART: Final = re.compile(r"part-([0-9]{5,})\.(jsonl|parquet)")


class PartSize(NamedTuple):
    """How far a table was written: the number of its open part, the bytes in it, the time of its last row."""

    part: Annotated[int, msgspec.Meta(ge=0)]
    bytes: Annotated[int, msgspec.Meta(ge=0)]
    t: Annotated[float, msgspec.Meta(ge=0)] = 0.0


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
