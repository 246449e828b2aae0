"""Rows of a run as its files store them: JSON lines in memory, Parquet files by path.

JSON lines are read up to the last complete line. If a training was killed, the rows of its unfinished
iteration come last in each table. DuckDB reads Parquet files when their rows are requested. Rows must agree
with the run row, because rows of a damaged file can be valid alone.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import duckdb
import msgspec

from esper.files.row_files import check_layout, old_run_error, row_files, split_lines
from esper.files.writer_lock import is_being_written, signature
from esper.leyline import BLEND_IDS, HEAD_NAMES, SCHEMA_VERSION, STAGE_NAMES, TABLES, UNREADABLE, EsperError
from esper.leyline.columns import COLUMNS, LISTS, TABLE_OF
from esper.leyline.rows import DecisionRow, EpisodeRow, Row, RunRow, TransitionRow, UpdateRow

R = TypeVar("R", bound=Row)
State = Literal["running", "finished", "stopped"]
DATABASE_ERRORS: Final = (duckdb.Error, UnicodeDecodeError)
"""Exceptions that DuckDB raises for invalid queries and damaged Parquet files."""
READ_ATTEMPTS: Final = 100
"""Number of attempts to read the telemetry files; compaction may remove a listed file before it is read."""
SETTINGS: Final[dict[str, str | bool | int | float | list[str]]] = {
    # Async reads do not make local files faster, and their threads are slow to start.
    "async_threads": 0,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "enable_external_file_cache": False,  # A file that is replaced must not be answered from the cache.
    "python_enable_replacements": False,  # SQL queries must not use Python variables as tables.
    "temp_directory": "",
}
"""Settings of all databases that read a run."""

LONGEST: Final = 10_000_000
"""Largest number of epochs or iterations that readers accept."""


class StoredRows:
    """Rows of one run; ``look`` reads what was written since its last call, and all rows belong to that
    moment.
    """

    def __init__(self, telemetry: Path) -> None:
        self.telemetry = telemetry.resolve()
        self.lines: dict[str, list[bytes]] = {}
        """JSON lines by table; a new dict replaces this one if lines that were read have changed."""
        self.folders: list[Path] = []
        """Parquet folders; their rows are older than the JSON lines."""
        self.is_written = False
        """Whether a running process writes the run."""
        self._signature: bytes | None = None
        self._stamps: dict[Path, tuple[int, ...]] = {}
        self._rows: dict[type[Row], list[Any]] = {}

    def look(self) -> None:
        """Read the files as they are now; raises ``EsperError`` if they are not readable."""
        for _ in range(READ_ATTEMPTS):
            try:
                return self._look()
            except FileNotFoundError:
                continue  # A listed file was compacted to Parquet and removed; list the files again.
            except OSError as error:
                raise EsperError(f"'{error.filename}' cannot be read: {error.strerror}") from None
        raise EsperError(f"the files in '{self.telemetry}' come and go; try again")

    def _look(self) -> None:
        # A writer that resumes at a checkpoint signs after it has removed rows and before it writes new ones.
        # The signature is read before the files, so files read under the new signature have no removed rows.
        self.is_written, signed = is_being_written(self.telemetry), signature(self.telemetry)
        found = row_files(self.telemetry)
        folders, files = [span.path for span in found.parquet], [span.path for span in found.lines]
        if not self.is_written:
            files += [path for span in found.unfinished for path in sorted(span.path.glob("*.jsonl"))]
        stamps = [(path, stamp_of(path.stat())) for path in files]
        if (signed, stamps, folders) == (self._signature, list(self._stamps.items()), self.folders):
            return
        self.folders = folders
        self._rows.clear()
        if signed != self._signature or stamps[: len(self._stamps)] != list(self._stamps.items()):
            self._check_version()
            self.lines, self._stamps = {table: [] for table in TABLES}, {}
        self._signature = None  # After an error, the next call reads all files again.
        for path, stamp in stamps[len(self._stamps) :]:
            split_lines(path, path.read_bytes(), self.lines)
            self._stamps[path] = stamp
        self._signature = signed

    def _check_version(self) -> None:
        """Raise an error if the run was written with another schema version, whose columns differ."""
        check_layout(self.telemetry)
        for version in self._from_parquet("schema_version", "run"):
            if version != SCHEMA_VERSION:
                raise old_run_error(self.telemetry.parent, version)

    # --- rows ---------------------------------------------------------------------------------------

    def rows(self, row_type: type[R]) -> list[R]:
        """Return the rows of a telemetry table, oldest first.

        Raises:
            EsperError: A row cannot be decoded, or does not agree with the run row.
        """
        if row_type not in self._rows:
            table = TABLE_OF[row_type]
            rows = decoded(row_type, self._from_parquet("to_json(found)", table))
            rows += self.decoded_lines(row_type)
            self._rows[row_type] = self.checked(row_type, rows)
        return self._rows[row_type]

    def checked(self, row_type: type[R], rows: list[R]) -> list[R]:
        """Return rows of a table; raise ``EsperError`` unless they agree with each other and the run row."""
        run = rows[0] if rows and isinstance(rows[0], RunRow) else rows and self.run_row
        if run:
            check_rows(row_type, rows, run)
        return rows

    def decoded_lines(self, row_type: type[R]) -> list[R]:
        """Return the rows of a telemetry table that are JSON lines, oldest first."""
        try:
            return decoded(row_type, self.lines[TABLE_OF[row_type]])
        except EsperError as error:
            raise self._located(row_type) or error from None

    def parquet_source(self, table: str) -> str:
        """Return the SQL function that reads the Parquet files of a telemetry table; empty if it has none."""
        files = [path for folder in self.folders if (path := folder / f"{table}.parquet").exists()]
        return f"read_parquet([{', '.join(sql_text(str(path)) for path in files)}])" if files else ""

    def damaged(self, table: str, error: Exception) -> EsperError:
        """Return the error for a table that DuckDB cannot read."""
        return EsperError(f"table '{table}' of '{self.telemetry.parent}' cannot be read: {error_text(error)}")

    def _from_parquet(self, column: str, table: str) -> list[Any]:
        source = self.parquet_source(table)
        if not source:
            return []
        try:
            found = _database().cursor().execute(f"SELECT {column} FROM {source} found").fetchall()
            return [value for (value,) in found]
        except DATABASE_ERRORS as error:
            _database.cache_clear()  # An internal error of DuckDB invalidates the database.
            raise self.damaged(table, error) from None

    def _located(self, row_type: type[Row]) -> EsperError | None:
        """Return an error with the place of the first JSON line that is not a row of the table."""
        begin, decode = f'{{"table":"{TABLE_OF[row_type]}",'.encode(), msgspec.json.Decoder(row_type).decode
        for path in self._stamps:
            for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
                try:
                    if line.startswith(begin):
                        decode(line)
                except UNREADABLE as reason:
                    place = f"{path}, line {number}"
                    return EsperError(f"{place}, is not a row of table '{TABLE_OF[row_type]}': {reason}")
        return None

    # --- run ----------------------------------------------------------------------------------------

    @property
    def run_row(self) -> RunRow | None:
        """Run row; None if it is not written yet."""
        return next(iter(self.rows(RunRow)), None)

    @property
    def state(self) -> State:
        """State of the run: a live writer holds the lock, a finished run has all planned rows."""
        if self.is_written:
            return "running"
        row = self.run_row
        if row is None:
            return "stopped"
        planned, episodes = row.iterations, row.config.get("episodes")
        if planned is not None:
            done = max((update.iteration for update in self.rows(UpdateRow)), default=0)
        elif isinstance(episodes, int):
            planned, done = episodes * row.envs, len(self.rows(EpisodeRow))
        return "finished" if planned is not None and done >= planned else "stopped"


def decoded(row_type: type[R], texts: Iterable[bytes | str]) -> list[R]:
    """Decode rows of a telemetry table from JSON."""
    decode, rows = msgspec.json.Decoder(row_type).decode, list[R]()
    try:
        for text in texts:
            rows.append(decode(text))
    except UNREADABLE as error:
        table = TABLE_OF[row_type]
        raise EsperError(f"row {len(rows) + 1} of table '{table}' is not one: {error}") from None
    return rows


def error_text(error: Exception) -> str:
    """Return the message of a DuckDB error without its excerpt of the query."""
    return " ".join(str(error).partition("\n\nLINE ")[0].split())


def sql_text(value: str) -> str:
    """Quote text for SQL."""
    return "'" + value.replace("'", "''") + "'"


def stamp_of(status: os.stat_result) -> tuple[int, ...]:
    """Return values that change with the content of a file: inode, size, and times of modification and
    change.
    """
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@cache
def _database() -> duckdb.DuckDBPyConnection:
    """Return the database that reads whole Parquet files of all runs, because opening one takes 20 ms."""
    database = duckdb.connect(":memory:", config={**SETTINGS, "threads": 1})
    return database.execute("PRAGMA disable_optimizer")


# --- agreement of rows with the run row ---------------------------------------------------------------


def check_rows(row_type: type[Row], rows: Sequence[Row], run: RunRow) -> None:
    """Raise ``EsperError`` for the first row with a number or a list that the run row does not allow, and for
    an episode that has two rows.
    """
    ranges, names = list(_ranges(row_type, run)), row_type.__struct_fields__
    lengths = [(name, len(getattr(run, LISTS[name]))) for name in names if name in LISTS]
    ended = set()
    for number, row in enumerate(rows, start=1):
        problem = next(_problems(row, ranges, lengths, run), None)
        if isinstance(row, EpisodeRow):
            if (key := (row.env, row.episode, row.attempt)) in ended:
                problem = "its episode has a row already; remove one of the two"
            ended.add(key)
        if problem is not None:
            raise EsperError(f"row {number} of table '{TABLE_OF[row_type]}' is damaged: {problem}")


def _problems(
    row: Row, ranges: Sequence[tuple[str, int, int]], lengths: Sequence[tuple[str, int]], run: RunRow
) -> Iterator[str]:
    for name, low, high in ranges:
        value = getattr(row, name)
        if value is not None and not low <= value < high:
            yield f"{name} is {value}, and must be {low} to {high - 1}"
    for name, length in lengths:
        entries = getattr(row, name)  # None if unknown, and empty if an update was skipped
        if entries and len(entries) != length:
            yield f"{name} has {len(entries)} entries, and must have {length}"
    if isinstance(row, DecisionRow):
        yield from _unknown_choices(row, run)
    if isinstance(row, RunRow) and (tuple(row.heads), len(row.head_choices)) != (HEAD_NAMES, len(HEAD_NAMES)):
        known = f"this version of esper reads those of {', '.join(HEAD_NAMES)}"
        yield f"it has the choices of the heads {', '.join(row.heads) or 'none'}, and {known}"


def _unknown_choices(row: DecisionRow, run: RunRow) -> Iterator[str]:
    counts = map(len, (run.ops, run.slots, *run.head_choices[2:]))
    if len(row.action) != len(HEAD_NAMES):
        yield "its action has no value for some heads"
    for head, choice, count in zip(HEAD_NAMES, row.action, counts, strict=False):
        if not 0 <= choice < count:
            yield f"head {head} has no choice {choice}"


def _ranges(row_type: type[Row], run: RunRow) -> Iterator[tuple[str, int, int]]:
    """Yield each whole-number column of a row type with its lowest value and its limit."""
    counts = {"slot": len(run.slots), "blueprint": len(run.blueprints), "style": len(BLEND_IDS)}
    counts |= dict.fromkeys(("stage", "from_stage", "to_stage"), len(STAGE_NAMES))
    for column in COLUMNS[TABLE_OF[row_type]]:
        if column.sql_type == "BIGINT":
            longest = LONGEST + 1 if column.unit in ("epoch", "iteration") else 2**63
            # A transition of an empty slot has no seed, which is -1.
            low = -1 if row_type is TransitionRow and column.name in ("seed", "blueprint") else 0
            yield column.name, low, counts.get(column.name, longest)
