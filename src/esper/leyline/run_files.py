"""The files of a run's telemetry: what the writer leaves and every reader looks for.

``DIR/telemetry/<table>/part-00000.jsonl, part-00001.jsonl, …``: rows in the order in which they came.
A part that is closed becomes ``part-NNNNN.parquet``; while both are there they hold the same rows.
The writer holds a lock on ``DIR/telemetry/writer.lock`` as long as it lives.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple

from esper.leyline.errors import EsperError

TELEMETRY: Final = "telemetry"
LOCK_FILE: Final = "writer.lock"
PartKind = Literal["jsonl", "parquet"]
_PART: Final = re.compile(r"part-([0-9]{5,})\.(jsonl|parquet)")


class PartSize(NamedTuple):
    """How far a table was written: the number of its open part, and the bytes in it."""

    part: int
    bytes: int


def part_path(folder: Path, number: int, kind: PartKind) -> Path:
    """Where a part of the table in ``folder`` is found."""
    return folder / f"part-{number:05d}.{kind}"


def list_parts(folder: Path) -> dict[int, Path]:
    """The parts of the table in ``folder`` by number, in order; Parquet where a part is there as both.

    While a writer works, one look may miss a part that turns into Parquet meanwhile; two equal ones do not.
    """
    found = _look(folder)
    while found != (found := _look(folder)):
        pass
    if list(found) != list(range(len(found))):
        missing = next(number for number in range(len(found)) if number not in found)
        raise EsperError(f"'{folder}' is damaged: part {missing} is gone and later ones are there")
    return found


def _look(folder: Path) -> dict[int, Path]:
    return dict(
        sorted(_part_files(folder))
    )  # .parquet sorts after .jsonl, and the last one of a number counts


def _part_files(folder: Path) -> Iterator[tuple[int, Path]]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    for name in names:
        if match := _PART.fullmatch(name):
            yield int(match[1]), folder / name
