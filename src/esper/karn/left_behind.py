"""What a training that was killed left of an iteration: its journals, which no table has taken in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from esper.leyline.columns import TABLE_OF
from esper.leyline.events import UpdateRow
from esper.leyline.run_files import PartSize, is_being_written, journal_files, part_path, read_written

ITERATIONS: Final = TABLE_OF[UpdateRow]
BEGIN: Final = PartSize(0, 0)
EVERYTHING: Final[Mapping[str, PartSize]] = MappingProxyType({})


class LeftBehind(NamedTuple):
    """The journals to be read behind the tables."""

    journals: tuple[Path, ...]
    sizes: Mapping[str, PartSize]
    """How far tables count: what is beyond stands in the journals, and whole. Others count to their end."""


def left_behind(telemetry: Path) -> LeftBehind:
    """Journals count of a run that nobody writes any more. While one is written, only complete iterations do."""
    is_over = not is_being_written(telemetry)
    first, sizes = 1, EVERYTHING
    if (written := read_written(telemetry)) is not None:
        if written.sizes is None or _is_added(telemetry, written.sizes.get(ITERATIONS, BEGIN)):
            first = written.iteration + 1
        else:
            first, sizes = written.iteration, written.sizes
    journals = journal_files(telemetry) if is_over else []
    return LeftBehind(tuple(path for number, path in journals if number >= first), sizes)


def _is_added(telemetry: Path, size: PartSize) -> bool:
    """Whether the iteration's own row is in its table: it is written after everything that was lived."""
    try:
        with part_path(telemetry / ITERATIONS, size.part, "jsonl").open("rb") as file:
            file.seek(size.bytes)
            return b"\n" in file.read()
    except FileNotFoundError:
        return False


def lines_of(table: str, journals: Sequence[Path]) -> bytes:
    """The rows of one table in all journals, as JSON lines; a torn last line is left out."""
    mark = f"{table}\t".encode()
    contents = [journal.read_bytes() for journal in journals]
    return b"".join(
        line.removeprefix(mark)
        for content in contents
        for line in content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
        if line.startswith(mark)
    )
