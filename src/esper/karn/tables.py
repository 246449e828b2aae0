"""Telemetry tables of a run as DuckDB views that can be queried while the run is in progress.

Parquet files of rows are scanned in place, without a copy. JSON lines of rows are copied into memory, so no
query reads a file that is about to be removed. The database of a run can read only the run's telemetry and
writes nothing.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

import duckdb

from esper.files.row_files import decoding_query
from esper.karn.stored_rows import DATABASE_ERRORS, SETTINGS, StoredRows, error_text, sql_text
from esper.leyline import HEAD_NAMES, TABLES, EsperError, UnknownNameError
from esper.leyline.columns import COLUMNS

DECISIONS: Final = "decisions"
"""View of the table ``decision`` with names instead of indices."""
VIEWS: Final = (*TABLES, DECISIONS)
"""Names of telemetry tables and views that a SQL query may use."""


class QueryError(EsperError):
    """Error: a SQL query is not allowed, or fails."""


def check_statement(query: str) -> None:
    """Raise ``QueryError`` unless the SQL query is one statement that only reads."""
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
    """In-memory database with the tables of one run as views."""

    def __init__(self, stored: StoredRows, memory: int | None = None) -> None:
        """Open the in-memory database of a run.

        Args:
            stored: Rows of the run.
            memory: Memory limit of the database in MB; None means no limit.
        """
        self._stored = stored
        self._connection = _locked_database(stored.telemetry, memory)
        self._connection.execute("CREATE SCHEMA lines")
        self._lines = stored.lines
        """JSON lines of each table, of which the first ``_inserted`` are in the database."""
        self._inserted: Counter[str] = Counter()
        """Number of JSON lines of each table in the database."""
        self._definitions: dict[str, str] = {}
        """SQL definition of every view created so far, by name."""

    def current(self, names: Collection[str]) -> duckdb.DuckDBPyConnection:
        """Update the views with the given names and return the connection to the database."""
        for name in names:
            if name not in VIEWS:
                raise UnknownNameError("table", name, VIEWS)
        if DECISIONS in names:
            names = ["run", "decision", *names]
        self._stored.look()
        if self._stored.lines is not self._lines:
            self._connection.execute("DROP SCHEMA lines CASCADE; CREATE SCHEMA lines")
            self._lines = self._stored.lines
            self._inserted.clear()
        for name in dict.fromkeys(names):
            self._define(name, _decisions_view() if name == DECISIONS else self._view_of(name))
        return self._connection

    def ready_for(self, query: str) -> duckdb.DuckDBPyConnection:
        """Update the views whose names occur as words in a query, or all views if no name occurs; return the
        connection to the database.
        """
        words = set(re.findall(r"\w+", query.lower()))
        return self.current([name for name in VIEWS if name in words] or VIEWS)

    def _table_of_lines(self, name: str) -> str:
        """Insert the new JSON lines of a table into the database and return the qualified name of the table
        with all lines.

        Inserted JSON lines are in a schema other than main, so SHOW TABLES does not list their tables.
        """
        table = f'lines."{name}"'
        columns = ", ".join(f'"{column.name}" {column.sql_type}' for column in COLUMNS[name])
        self._connection.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns})")
        if lines := self._lines[name][self._inserted[name] :]:
            self._stored.decoded_lines(TABLES[name])  # Lines that are not rows of the table raise an error.
            self._execute(name, f"INSERT INTO {table} {decoding_query(name)}", map(bytes.decode, lines))
            self._inserted[name] += len(lines)
        return table

    def _view_of(self, table: str) -> str:
        sources = self._stored.parquet_source(table), self._table_of_lines(table)
        names = ", ".join(f'"{column.name}"' for column in COLUMNS[table])
        return " UNION ALL ".join(f"SELECT {names} FROM {source}" for source in sources if source)

    def _define(self, name: str, definition: str) -> None:
        if self._definitions.get(name) != definition:
            self._execute(name, f'CREATE OR REPLACE VIEW "{name}" AS {definition}')
            self._definitions[name] = definition

    def _execute(self, table: str, statement: str, *lists: Iterable[str]) -> None:
        """Execute SQL on a table or view, with lists of text as parameters; raise ``EsperError`` if the table
        cannot be read or a text cannot be decoded.
        """
        try:
            self._connection.execute(statement, [list(texts) for texts in lists])
        except DATABASE_ERRORS as error:
            raise self._stored.damaged(table, error) from None


# --- database ---------------------------------------------------------------------------------------


def _locked_database(telemetry: Path, memory: int | None) -> duckdb.DuckDBPyConnection:
    """Open an in-memory database that can read only ``telemetry`` and whose settings are locked."""
    settings = dict(SETTINGS)
    if memory is not None:
        settings |= {"memory_limit": f"{memory}MB", "threads": 1}
    return duckdb.connect(":memory:", config=settings).execute(
        f"SET allowed_directories = [{sql_text(f'{telemetry}/')}]; SET enable_external_access = false;"
        " SET lock_configuration = true"
    )


# --- SQL --------------------------------------------------------------------------------------------


def _decisions_view() -> str:
    """Return the SQL of the view ``decisions``, which takes the names of choices from the lists of the run
    row.

    The column of a policy head in the view ``decisions`` is null if the chosen op does not use the head.
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
