"""Names of the row files in a run's telemetry folder, for the writer and all readers.

``rows-00007.jsonl``: rows of training iteration 7, all tables in order of writing. Each line is a JSON object
that begins with the name of its table. Number 0 holds the rows before the first iteration. The writer renames
the file to this name when the iteration is complete. A run without a training appends to one file until it
reaches its size limit.

``rows-00000-00007``: folder with the rows of numbers 0 to 7 as Parquet, one file per table. JSON lines of a
number within the range are duplicates, and readers ignore them.

``unfinished-00008``: folder with the JSON lines of an iteration in progress, one file per shard of
environments. Readers use it when the iteration was never completed and no process writes the run.
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
    """Position of the writer at a checkpoint: last iteration with a row file, and seconds since the start."""

    iteration: Annotated[int, msgspec.Meta(ge=0)]
    seconds: Annotated[float, msgspec.Meta(ge=0)]


class RowSpan(NamedTuple):
    """One file of JSON lines or one Parquet folder, with the range of numbers that it holds."""

    first: int
    last: int
    path: Path

    @property
    def is_lines(self) -> bool:
        return self.path.suffix == ".jsonl"


class RowFiles(NamedTuple):
    """All files and folders with rows of one run, in order of their numbers."""

    spans: list[RowSpan]
    unfinished: list[RowSpan]
    """Folders of iterations that are not complete."""
    superseded: list[RowSpan]
    """Files and folders whose rows are also in another span."""

    @property
    def last(self) -> int:
        """Highest complete number, -1 if there is none."""
        return self.spans[-1].last if self.spans else -1

    @property
    def lines(self) -> list[RowSpan]:
        return [span for span in self.spans if span.is_lines]

    @property
    def parquet(self) -> list[RowSpan]:
        return [span for span in self.spans if not span.is_lines]


def lines_path(telemetry: Path, number: int) -> Path:
    """Return the path of the JSON lines of one number."""
    return telemetry / f"rows-{number:05d}.jsonl"


def parquet_path(telemetry: Path, first: int, last: int) -> Path:
    """Return the path of the Parquet folder of a range of numbers."""
    return telemetry / f"rows-{first:05d}-{last:05d}"


def unfinished_path(telemetry: Path, number: int) -> Path:
    """Return the path of the folder of an iteration in progress."""
    return telemetry / f"{UNFINISHED}{number:05d}"


def row_files(telemetry: Path) -> RowFiles:
    """List the row files of a run.

    The folder is listed until two listings are equal: a single listing can miss lines that a running writer
    is converting to Parquet.

    Raises:
        EsperError: The numbers have a gap.
    """
    names = sorted(os.listdir(telemetry))
    while names != (again := sorted(os.listdir(telemetry))):
        names = again
    found = RowFiles([], [], [])
    # Of two spans with the same start the longer one comes first: Parquet before the lines that it replaces.
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
    """Sort the complete lines of a file by table and append them to ``into``, without the table names.

    Bytes after the last newline are ignored: that line is still being written, or was cut off.

    Args:
        path: File that ``content`` was read from, for error messages.
        content: Content of the file.
        into: Lines by table, extended in place.
    """
    tables = {table.encode(): into.setdefault(table, []) for table in TABLES}
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        match = _LINE.match(line)
        if match is None or match[1] not in tables:
            raise EsperError(f"{path}, line {number}, is not a row: it must begin with the name of a table")
        tables[match[1]].append(b"{" + line[match.end() :])


def check_layout(telemetry: Path) -> None:
    """Raise ``EsperError`` for a run of another schema version or with the old layout, a folder per table."""
    old, new = telemetry / "run" / "part-00000.jsonl", lines_path(telemetry, 0)
    if old.exists():
        raise old_run_error(telemetry.parent, _version(old))
    if new.exists() and (version := _version(new)) not in (None, SCHEMA_VERSION):
        raise old_run_error(telemetry.parent, version)


def _version(lines: Path) -> int | None:
    """Return the schema version in the run row, which is the first line; None while it is missing."""
    with lines.open("rb") as file:
        found = re.search(rb'"schema_version":(\d+)', file.read(10_000))
    return int(found[1]) if found else None


def old_run_error(directory: Path, version: int | None) -> EsperError:
    """Return the error for a run that another schema version wrote."""
    return EsperError(
        f"'{directory}' was written with version {version or 'unknown'} of the tables; this version of esper"
        f" reads {SCHEMA_VERSION}: use the version of esper that wrote it, or run it again"
    )
