"""A run's telemetry as tables in DuckDB: one view per table, read while it is written.

Parquet is scanned where it lies. What is still JSON lines is copied into memory, up to the last whole line,
so that no query meets a line that is being written or a file that is about to go. Of a training that was
killed, the rows of the iteration in progress stand at the end of each table. The database reads the run's
own telemetry and nothing else, and writes nothing.
"""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import duckdb

from esper.karn.jsonl_tables import JsonlTables, error_text, quoted
from esper.leyline.columns import COLUMNS
from esper.leyline.errors import EsperError, UnknownNameError
from esper.leyline.events import SCHEMA_VERSION, TABLES
from esper.leyline.factored_actions import HEAD_NAMES
from esper.leyline.lock import is_being_written
from esper.leyline.run_files import check_layout, old_run_error, row_files

DECISIONS: Final = "decisions"
"""The table of decisions with names in the place of indices."""
VIEWS: Final = (*TABLES, DECISIONS)
"""What a query may name."""
READ_ATTEMPTS: Final = 100
"""How often in a row lines may turn into Parquet between being listed and being read."""


class QueryError(EsperError):
    """A query that is not allowed, or cannot be answered."""


def views_in(text: str) -> list[str]:
    """The views whose names are words of a piece of SQL."""
    words = set(re.findall(r"\w+", text.lower()))
    return [name for name in VIEWS if name in words]


def check_statement(query: str) -> None:
    """Refuse everything but one statement that reads."""
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
    """One in-memory database with the views of one run."""

    def __init__(self, telemetry: Path, memory: int | None = None) -> None:
        """``memory`` is in MB; without a limit the database takes what the machine has."""
        self._telemetry = telemetry.resolve()
        self._connection = _locked_database(self._telemetry, memory)
        self._lines = JsonlTables(self._connection)
        self._definitions: dict[str, str] = {}
        """The text of every view."""
        self._check_version()

    def current(self, names: Collection[str]) -> duckdb.DuckDBPyConnection:
        """The connection, after the named views were brought up to date."""
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
        """The connection, up to date in what a query names; in everything if it names nothing we know."""
        return self.current(views_in(query) or VIEWS)

    def _check_version(self) -> None:
        """Before anything is asked: other versions have other columns."""
        check_layout(self._telemetry)
        for folder in self._look():
            file = folder / "run.parquet"
            query = f"SELECT schema_version FROM read_parquet({_text(str(file))})"
            for (version,) in self._connection.execute(query).fetchall() if file.exists() else ():
                if version != SCHEMA_VERSION:
                    raise old_run_error(self._telemetry.parent, version)

    def _look(self) -> list[Path]:
        """Read the lines that are there now; the folders of Parquet before them."""
        for _ in range(READ_ATTEMPTS):
            try:
                is_over = not is_being_written(self._telemetry)
                found = row_files(self._telemetry)
                unfinished = [path for span in found.unfinished for path in sorted(span.path.glob("*.jsonl"))]
                self._lines.read([*(span.path for span in found.lines), *(unfinished if is_over else [])])
            except FileNotFoundError:
                continue  # it has become Parquet
            except OSError as error:
                raise EsperError(f"'{error.filename}' cannot be read: {error.strerror}") from None
            return [span.path for span in found.parquet]
        raise EsperError(f"the files in '{self._telemetry}' come and go; try again")

    def _view_of(self, table: str, folders: Sequence[Path]) -> str:
        sources = [self._lines.table(table)]
        files = [path for folder in folders if (path := folder / f"{table}.parquet").exists()]
        if files:
            sources.insert(0, f"read_parquet([{', '.join(_text(str(path)) for path in files)}])")
        names = ", ".join(quoted(column.name) for column in COLUMNS[table])
        return " UNION ALL ".join(f"SELECT {names} FROM {source}" for source in sources)

    def _define(self, name: str, definition: str) -> None:
        if self._definitions.get(name) != definition:
            try:
                self._connection.execute(f"CREATE OR REPLACE VIEW {quoted(name)} AS {definition}")
            except duckdb.Error as error:
                raise EsperError(f"table '{name}' cannot be read: {error_text(error)}") from None
            self._definitions[name] = definition


# --- the database ---------------------------------------------------------------------------------


def _locked_database(telemetry: Path, memory: int | None) -> duckdb.DuckDBPyConnection:
    """A database in memory that reads files of ``telemetry`` only, and whose settings cannot be changed."""
    settings: dict[str, str | bool | int | float | list[str]] = {
        "async_threads": 0,  # files are near, and a thread takes long to start
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "python_enable_replacements": False,  # names of Python variables are no tables
        "temp_directory": "",
    }
    if memory is not None:
        settings |= {"memory_limit": f"{memory}MB", "threads": 1}
    connection = duckdb.connect(":memory:", config=settings)
    connection.execute(f"SET allowed_directories = [{_text(f'{telemetry}/')}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


# --- pieces of SQL --------------------------------------------------------------------------------


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _decisions_view() -> str:
    """Decisions with the names that the run's own row gives to their indices, all by lookup in lists.

    The name of a head's choice is null where the op did not read the head.
    """
    places = ", ".join(f"list_position(heads, '{head}') AS {head}_at" for head in HEAD_NAMES)
    names = ", ".join(
        f"CASE WHEN read[{head}_at] THEN head_choices[{head}_at][action[{head}_at] + 1] END AS {head}"
        for head in HEAD_NAMES
    )
    masked = ", ".join(f"masked[{head}_at] AS {head}_masked" for head in HEAD_NAMES)
    return (
        f"WITH run_names AS (SELECT head_choices, {places} FROM run LIMIT 1)"
        f" SELECT decision.t, env, episode, epoch, {names}, op_probs[action[op_at] + 1] AS op_probability,"
        " succeeded, forced, refused_by, failed_checks, value, reward, reward_terms,"
        f" {masked} FROM decision LEFT JOIN run_names ON true"
    )
