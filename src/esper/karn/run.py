"""Reader of one run: its run row, state, rows and tables; the run may still be in progress.

The result of a user's SQL query is limited in rows, bytes and memory: rows beyond the row limit are omitted
with a note, and a result beyond the limit of bytes or memory is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import duckdb
import msgspec

from esper.files.row_files import TELEMETRY
from esper.karn.stored_rows import DATABASE_ERRORS, R, State, StoredRows, decoded, error_text
from esper.karn.tables import QueryError, Tables, check_statement
from esper.leyline import EsperError, RunRow, UnknownNameError
from esper.leyline.columns import TABLE_OF

DAMAGE: Final = (EsperError, duckdb.Error, OSError, LookupError, ValueError, TypeError, ArithmeticError)
"""Errors caused by the files of a run: unreadable files, or rows that contradict each other."""
FETCHED: Final = 100
"""Number of rows of a query result that are fetched from the database at once."""
MAX_BYTES: Final = 50_000_000
"""Largest allowed size of the result of a SQL query, encoded as JSON, in bytes."""
MEMORY: Final = 4_000
"""Memory limit of the database for a user's SQL query, in MB."""


def open_run(path: Path | str) -> Run:
    """Open the run in a directory; the run may still be in progress.

    Args:
        path: Run directory, such as ``runs/NAME`` or the directory ``out`` of ``esper.grow``.

    Returns:
        The run, whose methods return its telemetry tables.

    Raises:
        EsperError: The directory is missing or is not a run directory.

    Example:
        >>> run = esper.open_run("runs/first")
    """
    directory = Path(path)
    if not directory.is_dir():
        raise EsperError(f"there is no run directory '{directory}'")
    if not (directory / TELEMETRY).is_dir():
        raise EsperError(f"'{directory}' is not a run's directory: it holds no folder '{TELEMETRY}'")
    return Run(directory)


def read_rows(run_dir: Path | str, row_type: type[R]) -> list[R]:
    """Return all rows of a telemetry table of the run in a directory, oldest first."""
    return open_run(run_dir).rows(row_type)


class Run:
    """Telemetry of a run; every call reads the current files. The class ``Run`` is not thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stored = StoredRows(path / TELEMETRY)

    @cached_property
    def _tables(self) -> Tables:
        return Tables(self._stored)

    def look(self) -> StoredRows:
        """Read the current files and return all rows of this moment."""
        self._stored.look()
        return self._stored

    @cached_property
    def row(self) -> RunRow:
        """Run row: configuration of the run, and the names of slots, blueprints and ops, to which other rows
        refer by index.
        """
        row = self.look().run_row
        if row is None:
            raise EsperError(f"the run in '{self.path}' has not written its own row yet")
        return row

    @property
    def is_training(self) -> bool:
        """Whether the run trains a policy, so that its episodes belong to iterations."""
        return self.row.iterations is not None

    @property
    def state(self) -> State:
        """State of the run, derived from its files: a live writer holds the lock, a finished run has all
        planned rows.
        """
        return self.look().state

    def rows(self, row_type: type[R], where: str | None = None, parameters: Sequence[object] = ()) -> list[R]:
        """Return the rows of a telemetry table, oldest first.

        Args:
            row_type: Row type of the table, such as ``EpochRow``.
            where: SQL condition that the returned rows meet; None returns all rows.
            parameters: Values for the ``?`` in the SQL condition ``where``.

        Raises:
            QueryError: The condition ``where`` is not valid SQL.
            EsperError: A row of the table cannot be decoded.
        """
        if row_type not in TABLE_OF:
            raise UnknownNameError("row type", row_type.__name__, (known.__name__ for known in TABLE_OF))
        if where is None:
            return list(self.look().rows(row_type))
        table = TABLE_OF[row_type]
        query = f'SELECT to_json(found) FROM (SELECT * FROM "{table}" WHERE {where}) found'
        found = self._answer(query, parameters, f"the rows of '{table}' cannot be read")
        return self._stored.checked(row_type, decoded(row_type, (text for (text,) in found)))

    def sql(self, query: str, parameters: Sequence[object] = ()) -> duckdb.DuckDBPyRelation:
        """Return the result of one SELECT statement over the run's tables and the view ``decisions``.

        Example: ``open_run("runs/mine").sql("SELECT max(val_score) FROM epoch").fetchall()``
        """
        check_statement(query)
        connection = self._tables.ready_for(query)
        try:
            return connection.sql(query, params=list(parameters))
        except DATABASE_ERRORS as error:
            raise QueryError(f"the query cannot be answered: {error_text(error)}") from None

    def fetch(self, query: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of the result of one SELECT statement; raises ``QueryError`` as ``sql`` does."""
        check_statement(query)
        return self._answer(query, parameters, "the query cannot be answered")

    def _answer(self, query: str, parameters: Sequence[object], failure: str) -> list[tuple[Any, ...]]:
        try:
            return self._tables.ready_for(query).execute(query, list(parameters)).fetchall()
        except DATABASE_ERRORS as error:
            raise QueryError(f"{failure}: {error_text(error)}") from None

    def table(self, name: str) -> duckdb.DuckDBPyRelation:
        """Return a whole telemetry table, or the view ``decisions``."""
        return self._tables.current([name]).table(name)


# --- SQL queries of users ---------------------------------------------------------------------------


class SqlAnswer(msgspec.Struct):
    """Columns, types and rows of a query result, as JSON-compatible values."""

    columns: list[str]
    types: list[str]
    rows: list[list[Any]]
    note: str | None
    """Reason why rows of the query result are missing; None if the result is complete."""


def answer_query(
    run_dir: Path, query: str, max_rows: int | None, max_bytes: int = MAX_BYTES, memory: int = MEMORY
) -> SqlAnswer:
    """Run a SQL query over the tables of a run.

    Args:
        run_dir: Directory of the run.
        query: One SELECT, WITH, DESCRIBE or SHOW statement.
        max_rows: Largest number of rows to return; None returns all rows.
        max_bytes: Largest allowed size of the result, encoded as JSON, in bytes.
        memory: Memory limit of the database that executes the query, in MB.

    Raises:
        QueryError: The statement is not allowed, fails, or exceeds the limit of bytes or memory.
    """
    check_statement(query)
    try:
        found = Tables(StoredRows(run_dir / TELEMETRY), memory).ready_for(query).execute(query)
        described = found.description or []
        rows, note = _taken(found, max_rows, max_bytes)
    except (duckdb.OutOfMemoryException, MemoryError):
        raise QueryError(f"the query needs more than {memory} MB of memory; ask for less") from None
    except DATABASE_ERRORS as error:
        raise QueryError(f"the query cannot be answered: {error_text(error)}") from None
    names, types = [name for name, *_ in described], [str(kind) for _, kind, *_ in described]
    return SqlAnswer(names, types, rows, note)


def _taken(
    found: duckdb.DuckDBPyConnection, max_rows: int | None, max_bytes: int
) -> tuple[list[list[Any]], str | None]:
    """Return the first rows of a query result, and a note if rows were omitted. Raise ``QueryError`` if the
    result is larger than ``max_bytes``.
    """
    rows: list[list[Any]] = []
    size = 0
    while fetched := found.fetchmany(FETCHED):
        for values in fetched:
            if len(rows) == max_rows:
                return rows, f"only the first {max_rows:,} rows are shown"
            row = [_plain(value) for value in values]
            size += len(msgspec.json.encode(row))
            if size > max_bytes:
                raise QueryError(
                    f"the answer is larger than {max_bytes / 1e6:g} MB; add a LIMIT, name fewer"
                    " columns, or aggregate with count, avg and GROUP BY"
                )
            rows.append(row)
    return rows, None


def _plain(value: Any) -> Any:
    """Convert a database value to a JSON value; dates and integers beyond 64 bits become text."""
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | str) or (isinstance(value, int) and abs(value) < 2**63):
        return value
    return str(value)
