"""The files of a run's telemetry: what the writer leaves and every reader looks for.

``rows-00007.jsonl``: the rows of iteration 7 of a training, all tables together and in order, each line a
JSON object that begins with the name of its table; 0 has what precedes the first iteration. The file gets its
name when the iteration is complete. A run that trains nothing appends to one file until that is full.

``rows-00000-00007``: the rows of these numbers as Parquet, one file per table. While lines of a number within
the range are there as well, they hold the same rows and do not count.

``unfinished-00008``: lines of an iteration in progress, one file per shard of environments. They count when
nobody writes the run any more, and the iteration was never completed.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from esper.leyline.errors import EsperError
from esper.leyline.rows import SCHEMA_VERSION, TABLES

TELEMETRY: Final = "telemetry"
UNFINISHED: Final = "unfinished-"
_ROWS: Final = re.compile(r"rows-([0-9]{5,})(?:\.jsonl|-([0-9]{5,}))")
_LINE: Final = re.compile(rb'\{"table":"(\w+)",')
_UNFINISHED: Final = re.compile(UNFINISHED + r"([0-9]{5,})")


class RowMark(NamedTuple):
    """How far rows were written at a checkpoint: the last iteration that has its file, and the run's time."""

    iteration: Annotated[int, msgspec.Meta(ge=0)]
    seconds: Annotated[float, msgspec.Meta(ge=0)]


class RowSpan(NamedTuple):
    """A file of lines, or a folder of Parquet, with the numbers of what it holds."""

    first: int
    last: int
    path: Path

    @property
    def is_lines(self) -> bool:
        return self.path.suffix == ".jsonl"


class RowFiles(NamedTuple):
    """Everything that holds rows of a run, in order."""

    spans: list[RowSpan]
    unfinished: list[RowSpan]
    """Folders of iterations that are not complete."""
    superseded: list[RowSpan]
    """What is there once more in another span."""

    @property
    def last(self) -> int:
        """The highest number of which all rows are there; -1: none."""
        return self.spans[-1].last if self.spans else -1

    @property
    def lines(self) -> list[RowSpan]:
        return [span for span in self.spans if span.is_lines]

    @property
    def parquet(self) -> list[RowSpan]:
        return [span for span in self.spans if not span.is_lines]


def lines_path(telemetry: Path, number: int) -> Path:
    """Where the rows of a number stand as JSON lines."""
    return telemetry / f"rows-{number:05d}.jsonl"


def parquet_path(telemetry: Path, first: int, last: int) -> Path:
    """Where the rows of a range of numbers stand as Parquet."""
    return telemetry / f"rows-{first:05d}-{last:05d}"


def unfinished_path(telemetry: Path, number: int) -> Path:
    """Where the rows of an iteration in progress stand."""
    return telemetry / f"{UNFINISHED}{number:05d}"


def row_files(telemetry: Path) -> RowFiles:
    """What a run's telemetry holds.

    While a writer works, one look may miss lines that turn into Parquet meanwhile; two equal ones do not.
    """
    names = sorted(os.listdir(telemetry))
    while names != (again := sorted(os.listdir(telemetry))):
        names = again
    found = RowFiles([], [], [])
    # Of two that begin alike the longer range comes first, and Parquet before the lines it was made of.
    for span in sorted(_spans(telemetry, names), key=lambda span: (span.first, -span.last)):
        if span.last <= found.last:
            found.superseded.append(span)
        elif span.first == found.last + 1:
            found.spans.append(span)
        else:
            raise EsperError(f"'{telemetry}' is damaged: {span.path.name} does not follow {found.last:05d}")
    for name in names:
        if match := _UNFINISHED.fullmatch(name):
            number = int(match[1])
            kept = found.unfinished if number > found.last else found.superseded
            kept.append(RowSpan(number, number, telemetry / name))
    return found


def _spans(telemetry: Path, names: list[str]) -> list[RowSpan]:
    matches = [match for name in names if (match := _ROWS.fullmatch(name))]
    return [RowSpan(int(match[1]), int(match[2] or match[1]), telemetry / match.string) for match in matches]


def split_lines(path: Path, content: bytes, into: dict[str, list[bytes]]) -> None:
    """Add the whole lines of a file to those of their tables, without the tables' names.

    What follows the last newline is torn, or being written just now.
    """
    tables = {table.encode(): into.setdefault(table, []) for table in TABLES}
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        match = _LINE.match(line)
        if match is None or match[1] not in tables:
            raise EsperError(f"{path}, line {number}, is not a row: it must begin with the name of a table")
        tables[match[1]].append(b"{" + line[match.end() :])


def check_layout(telemetry: Path) -> None:
    """Refuse the lines of another version, and a run of one that kept a folder per table."""
    old, new = telemetry / "run" / "part-00000.jsonl", lines_path(telemetry, 0)
    if old.exists():
        raise old_run_error(telemetry.parent, _version(old))
    if new.exists() and (version := _version(new)) not in (None, SCHEMA_VERSION):
        raise old_run_error(telemetry.parent, version)


def _version(lines: Path) -> int | None:
    """That of the run's own row, which is the first; None: it is not there yet."""
    with lines.open("rb") as file:
        found = re.search(rb'"schema_version":(\d+)', file.read(10_000))
    return int(found[1]) if found else None


def old_run_error(directory: Path, version: int | None) -> EsperError:
    """What is said of a run of another version."""
    return EsperError(
        f"'{directory}' was written with version {version or 'unknown'} of the tables; this version of esper"
        f" reads {SCHEMA_VERSION}: use the version of esper that wrote it, or run it again"
    )
