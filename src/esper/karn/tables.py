"""The tables of a run as DuckDB views that can be queried while the run is written.

Parquet files are scanned in place. JSON lines are copied into memory up to the last complete line, so no
query reads a partial line or a file that is about to be removed. If a training was killed, the rows of its
unfinished iteration come last in each table. The database can read only the run's telemetry and writes
nothing.
"""

import json
import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

import duckdb
import msgspec

from esper.files.row_files import check_layout, old_run_error, row_files, split_lines
from esper.files.writer_lock import is_being_written
from esper.leyline import HEAD_NAMES, SCHEMA_VERSION, TABLES, UNREADABLE, EsperError, UnknownNameError
from esper.leyline.columns import COLUMNS

DECISIONS: Final = "decisions"
"""View of the table ``decision`` with names instead of indices."""
VIEWS: Final = (*TABLES, DECISIONS)
"""Names of tables and views that a SQL query may use."""
READ_ATTEMPTS: Final = 100
"""Attempts to read the telemetry files; compaction may remove a listed file before it is read."""


class QueryError(EsperError):
    """Error: a SQL query is not allowed, or fails."""


def views_in(text: str) -> list[str]:
    """Return the views whose names occur as words in a piece of SQL."""
    words = set(re.findall(r"\w+", text.lower()))
    return [name for name in VIEWS if name in words]


def check_statement(query: str) -> None:
    """Raise ``QueryError`` unless the query is one statement that only reads."""
    try:
        kinds = [statement.type for statement in duckdb.extract_statements(query)]
    except duckdb.Error as error:
        raise QueryError(f"the query is not SQL: {error_text(error)}") from None
    if len(kinds) != 1:
        raise QueryError(f"one statement is allowed; found {len(kinds)}")
    if kinds[0] != duckdb.StatementType.SELECT:
        raise QueryError(
            "a run is read and never changed: SELECT, WITH, DESCRIBE and SHOW are allowed;"
            f" found {kinds[0].name}"
        )


class Tables:
    """In-memory database with the views of one run."""

    def __init__(self, telemetry: Path, memory: int | None = None) -> None:
        """Open the database.

        Args:
            telemetry: Telemetry folder of the run.
            memory: Memory limit in MB; None means no limit.
        """
        self._telemetry = telemetry.resolve()
        self._connection = _locked_database(self._telemetry, memory)
        self._connection.execute("CREATE SCHEMA lines")
        self._stamps: dict[Path, tuple[int, int, int]] = {}
        """Inode, size and modification time of the JSON files that were read, in reading order."""
        self._pending: dict[str, list[bytes]] = {}
        """JSON lines that were read but not yet inserted, by table."""
        self._definitions: dict[str, str] = {}
        """SQL of every view defined so far, by name."""
        self._check_version()

    def current(self, names: Collection[str]) -> duckdb.DuckDBPyConnection:
        """Update the named views and return the connection."""
        for name in names:
            if name not in VIEWS:
                raise UnknownNameError("table", name, VIEWS)
        if DECISIONS in names:
            names = ["run", "decision", *names]
        folders = self._look()
        for name in dict.fromkeys(names):
            self._define(name, _decisions_view() if name == DECISIONS else self._view_of(name, folders))
        return self._connection

    def ready_for(self, query: str) -> duckdb.DuckDBPyConnection:
        """Update the views that a query names, all views if it names none, and return the connection."""
        return self.current(views_in(query) or VIEWS)

    def _check_version(self) -> None:
        """Raise an error if the run has another schema version, whose columns differ."""
        check_layout(self._telemetry)
        for folder in self._look():
            file = folder / "run.parquet"
            query = f"SELECT schema_version FROM read_parquet({_text(str(file))})"
            for (version,) in self._connection.execute(query).fetchall() if file.exists() else ():
                if version != SCHEMA_VERSION:
                    raise old_run_error(self._telemetry.parent, version)

    def _look(self) -> list[Path]:
        """Read the current JSON lines and return the Parquet folders with the rows before these lines."""
        for _ in range(READ_ATTEMPTS):
            try:
                is_over = not is_being_written(self._telemetry)
                found = row_files(self._telemetry)
                unfinished = [path for span in found.unfinished for path in sorted(span.path.glob("*.jsonl"))]
                self._read([*(span.path for span in found.lines), *(unfinished if is_over else [])])
            except FileNotFoundError:
                continue  # The file was compacted to Parquet; list the files again.
            except OSError as error:
                raise EsperError(f"'{error.filename}' cannot be read: {error.strerror}") from None
            return [span.path for span in found.parquet]
        raise EsperError(f"the files in '{self._telemetry}' come and go; try again")

    def _read(self, files: Sequence[Path]) -> None:
        """Read the complete lines of the given JSON files in order; raises ``OSError``."""
        stamps = [(path, _stamp(path)) for path in files]
        if stamps[: len(self._stamps)] != list(self._stamps.items()):
            self._connection.execute("DROP SCHEMA lines CASCADE; CREATE SCHEMA lines")
            self._pending.clear()
            self._stamps.clear()
        for path, stamp in stamps[len(self._stamps) :]:
            split_lines(path, path.read_bytes(), self._pending)
            self._stamps[path] = stamp

    def _table_of_lines(self, name: str) -> str:
        """Insert the pending lines of a table and return the qualified name of the table with all lines.

        Inserted lines are in a schema other than main, which hides their tables from SHOW TABLES.
        """
        table = f"lines.{_quoted(name)}"
        columns = ", ".join(f"{_quoted(column.name)} {column.sql_type}" for column in COLUMNS[name])
        self._connection.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns})")
        structure = json.dumps({column.name: column.sql_type for column in COLUMNS[name]})
        insertion = (
            f"INSERT INTO {table} SELECT unnest(from_json_strict(line, '{structure}'))"
            " FROM (SELECT unnest(?::VARCHAR[]) AS line)"
        )
        try:
            if lines := self._pending.pop(name, None):
                self._connection.execute(insertion, [[line.decode() for line in lines]])
        except (duckdb.Error, UnicodeDecodeError) as error:
            raise EsperError(_bad_line_error(self._stamps, name, error)) from None
        return table

    def _view_of(self, table: str, folders: Sequence[Path]) -> str:
        sources = [self._table_of_lines(table)]
        files = [path for folder in folders if (path := folder / f"{table}.parquet").exists()]
        if files:
            sources.insert(0, f"read_parquet([{', '.join(_text(str(path)) for path in files)}])")
        names = ", ".join(_quoted(column.name) for column in COLUMNS[table])
        return " UNION ALL ".join(f"SELECT {names} FROM {source}" for source in sources)

    def _define(self, name: str, definition: str) -> None:
        if self._definitions.get(name) != definition:
            try:
                self._connection.execute(f"CREATE OR REPLACE VIEW {_quoted(name)} AS {definition}")
            except duckdb.Error as error:
                raise EsperError(f"table '{name}' cannot be read: {error_text(error)}") from None
            self._definitions[name] = definition


# --- database ---------------------------------------------------------------------------------------


def _locked_database(telemetry: Path, memory: int | None) -> duckdb.DuckDBPyConnection:
    """Open an in-memory database that can read only ``telemetry`` and whose settings are locked."""
    settings: dict[str, str | bool | int | float | list[str]] = {
        "async_threads": 0,  # Local files gain nothing from async reads, and threads are slow to start.
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "python_enable_replacements": False,  # Python variables must not be usable as tables.
        "temp_directory": "",
    }
    if memory is not None:
        settings |= {"memory_limit": f"{memory}MB", "threads": 1}
    connection = duckdb.connect(":memory:", config=settings)
    connection.execute(f"SET allowed_directories = [{_text(f'{telemetry}/')}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


# --- JSON lines -------------------------------------------------------------------------------------


def _stamp(path: Path) -> tuple[int, int, int]:
    status = os.stat(path)
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def _bad_line_error(files: Iterable[Path], table: str, error: Exception) -> str:
    """Return an error message that names the first JSON line that is not a row of the table."""
    decoder = msgspec.json.Decoder(TABLES[table])
    begin = f'{{"table":"{table}",'.encode()
    for path in files:
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
            try:
                if line.startswith(begin):
                    decoder.decode(line)
            except UNREADABLE as reason:
                return f"{path}, line {number}, is not a row of table '{table}': {reason}"
    return f"table '{table}' cannot be read: {error_text(error)}"


def error_text(error: Exception) -> str:
    """Return the message of a DuckDB error without the excerpt of the query."""
    return " ".join(str(error).partition("\n\nLINE ")[0].split())


# --- SQL --------------------------------------------------------------------------------------------


def _quoted(name: str) -> str:
    """Quote an identifier for SQL."""
    return '"' + name.replace('"', '""') + '"'


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _decisions_view() -> str:
    """Return the SQL of the view ``decisions``, which looks the names up in the lists of the run row.

    The choice of a policy head is null if the chosen op does not use the head.
    """
    positions = ", ".join(f"list_position(heads, '{head}') AS {head}_at" for head in HEAD_NAMES)
    names = ", ".join(
        f"CASE WHEN read[{head}_at] THEN head_choices[{head}_at][action[{head}_at] + 1] END AS {head}"
        for head in HEAD_NAMES
    )
    masked = ", ".join(f"masked[{head}_at] AS {head}_masked" for head in HEAD_NAMES)
    return (
        f"WITH run_names AS (SELECT head_choices, {positions} FROM run LIMIT 1)"
        f" SELECT decision.t, env, episode, epoch, {names}, op_probs[action[op_at] + 1] AS op_probability,"
        " succeeded, forced, refused_by, failed_checks, value, reward, reward_terms,"
        f" {masked} FROM decision LEFT JOIN run_names ON true"
    )
