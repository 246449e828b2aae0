"""Names of the row files in a run's telemetry folder, for the writer and all readers.

``rows-00007.jsonl``: rows of training iteration 7, all tables in order of writing. Each line is a JSON object
that begins with the name of its table. ``rows-00000.jsonl`` holds the rows before the first iteration. The
writer gives a row file its final name when the iteration is complete. A run without a policy training appends
to one row file until the file reaches its size limit.

``rows-00000-00007``: folder with the rows of iterations 0 to 7 as Parquet, one file per table. Readers ignore
JSON lines of an iteration that is also in a Parquet folder.

``unfinished-00008``: folder with the JSON lines of an iteration in progress, one file per shard of
environments. Readers use an unfinished folder only if no process writes the run any more.
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
    """Position of the row writer at a checkpoint: last iteration with a row file, seconds since run start."""

    iteration: Annotated[int, msgspec.Meta(ge=0)]
    seconds: Annotated[float, msgspec.Meta(ge=0)]


class RowSpan(NamedTuple):
    """One file of JSON lines or one Parquet folder, with the range of iterations whose rows are in it."""

    first: int
    last: int
    path: Path

    @property
    def is_lines(self) -> bool:
        return self.path.suffix == ".jsonl"


class RowFiles(NamedTuple):
    """All files and folders with rows of one run, in order of iterations."""

    spans: list[RowSpan]
    unfinished: list[RowSpan]
    """Row folders of iterations that are not complete."""
    superseded: list[RowSpan]
    """Row files and folders whose rows are also in another file or folder of the run."""

    @property
    def last(self) -> int:
        """Last iteration with a complete row file, -1 if there is none."""
        return self.spans[-1].last if self.spans else -1

    @property
    def lines(self) -> list[RowSpan]:
        return [span for span in self.spans if span.is_lines]

    @property
    def parquet(self) -> list[RowSpan]:
        return [span for span in self.spans if not span.is_lines]


def lines_path(telemetry: Path, number: int) -> Path:
    """Return the path of the JSON lines of one iteration."""
    return telemetry / f"rows-{number:05d}.jsonl"


def parquet_path(telemetry: Path, first: int, last: int) -> Path:
    """Return the path of the Parquet folder of a range of iterations."""
    return telemetry / f"rows-{first:05d}-{last:05d}"


def unfinished_path(telemetry: Path, number: int) -> Path:
    """Return the path of the row folder of an iteration in progress."""
    return telemetry / f"{UNFINISHED}{number:05d}"


def row_files(telemetry: Path) -> RowFiles:
    """List the row files of a run.

    The telemetry folder is listed until two listings are equal: a single listing can miss JSON lines that a
    running writer is converting to Parquet.

    Raises:
        EsperError: The row files of an iteration are missing.
    """
    names = sorted(os.listdir(telemetry))
    while names != (again := sorted(os.listdir(telemetry))):
        names = again
    found = RowFiles([], [], [])
    # Of two spans with the same start the longer is first: Parquet before the JSON lines that it replaces.
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
    """Append the complete JSON lines of a file to the lists of their tables in ``into``, without table names.

    Bytes after the last newline are ignored: the last line is still being written, or was cut off.

    Args:
        path: File that ``content`` was read from, for error messages.
        content: Content of the file.
        into: JSON lines by table, extended in place.
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
    """Return the schema version in the run row, the first JSON line; None while the run row is missing."""
    with lines.open("rb") as file:
        found = re.search(rb'"schema_version":(\d+)', file.read(10_000))
    return int(found[1]) if found else None


def old_run_error(directory: Path, version: int | None) -> EsperError:
    """Return the error for a run that another schema version wrote."""
    return EsperError(
        f"'{directory}' was written with version {version or 'unknown'} of the tables; this version of esper"
        f" reads {SCHEMA_VERSION}: use the version of esper that wrote it, or run it again"
    )
