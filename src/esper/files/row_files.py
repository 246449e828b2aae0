"""Names of the row files (files of telemetry rows) in a run's telemetry folder, for the writer and all
readers.

``rows-00007.jsonl``: rows of training iteration 7, of all telemetry tables, in order of writing. Each line of
a row file is a JSON object that begins with the name of its telemetry table. Rows before the first iteration
are in ``rows-00000.jsonl``. The writer gives a row file its final name when the iteration is complete. A run
without a policy training appends to one row file until the file reaches its size limit.

``rows-00000-00007``: folder with the rows of iterations 0 to 7 as Parquet, one file per table. Readers ignore
the JSON lines of an iteration whose rows are also in a Parquet folder.

``unfinished-00008``: folder with the JSON lines of an iteration in progress, one file for all environments
that train together. Readers use the folder only if no process writes the run any more.
"""

import json
import os
import re
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from esper.files.writer_lock import LOCK_FILE
from esper.leyline import SCHEMA_VERSION, TABLES, EsperError
from esper.leyline.columns import COLUMNS

TELEMETRY: Final = "telemetry"
UNFINISHED: Final = "unfinished-"
_ROWS: Final = re.compile(r"rows-([0-9]{5,})(?:\.jsonl|-([0-9]{5,}))")
_UNFINISHED: Final = re.compile(UNFINISHED + r"([0-9]{5,})")


class RowMark(NamedTuple):
    """Position of the row writer at a checkpoint: last iteration with a row file, and seconds since the start
    of the run."""

    iteration: Annotated[int, msgspec.Meta(ge=0)]
    seconds: Annotated[float, msgspec.Meta(ge=0)]


class RowSpan(NamedTuple):
    """File of JSON lines, or Parquet folder, with the range of iterations whose rows it contains."""

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
    """Folders with the rows of iterations that are not complete."""
    superseded: list[RowSpan]
    """Row files and folders that readers ignore, because another file or folder of the run has the same
    rows."""

    @property
    def last(self) -> int:
        """Last iteration whose row file is complete; -1 if there is none."""
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
    # Of two row files that begin with the same iteration, the one with more iterations comes first: Parquet
    # before the JSON lines that it replaces.
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
    """Append each complete JSON line of a row file to the list of its table in ``into``.

    Bytes after the last newline are ignored: the last line is still being written, or was cut off.

    Args:
        path: File that ``content`` was read from, for error messages.
        content: Bytes of the row file.
        into: Lists of JSON lines by table name, extended in place.
    """
    tables = {f'{{"table":"{table}'.encode(): into.setdefault(table, []) for table in TABLES}
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        own = tables.get(line[: line.find(b'",')])
        if own is None:
            raise EsperError(f"{path}, line {number}, is not a row: it must begin with the name of a table")
        own.append(line)


def decoding_query(table: str) -> str:
    """Return SQL whose result are the rows of a table; its parameter is a list of JSON lines."""
    structure = json.dumps({column.name: column.sql_type for column in COLUMNS[table]})
    return f"SELECT unnest(from_json_strict(line, '{structure}')) FROM (SELECT unnest(?::VARCHAR[]) AS line)"


def check_outside_runs(path: Path) -> None:
    """Raise ``EsperError`` if ``path`` is inside a folder of rows or of a study's journal."""
    place = Path(os.path.realpath(path))
    for folder in (place, *place.parents):
        if os.path.exists(folder / LOCK_FILE):
            raise EsperError(
                f"'{path}' is inside '{folder}', which only its writer may change; choose another --out"
            )


def check_layout(telemetry: Path) -> None:
    """Raise ``EsperError`` if a run was written with a schema version other than ``SCHEMA_VERSION``, or in
    the old layout with one telemetry folder per table.
    """
    old, new = telemetry / "run" / "part-00000.jsonl", lines_path(telemetry, 0)
    if old.exists():
        raise old_run_error(telemetry.parent, _version(old))
    if new.exists() and (version := _version(new)) not in (None, SCHEMA_VERSION):
        raise old_run_error(telemetry.parent, version)


def _version(lines: Path) -> int | None:
    """Return the schema version from the run row, which is the first JSON line of a run; None while that row
    is missing."""
    with lines.open("rb") as file:
        found = re.search(rb'"schema_version":(\d+)', file.read(10_000))
    return int(found[1]) if found else None


def old_run_error(directory: Path, version: int | None) -> EsperError:
    """Return the error for a run that was written with another schema version than ``SCHEMA_VERSION``."""
    return EsperError(
        f"'{directory}' was written with version {version or 'unknown'} of the tables; this version of esper"
        f" reads {SCHEMA_VERSION}: use the version of esper that wrote it, or run it again"
    )
