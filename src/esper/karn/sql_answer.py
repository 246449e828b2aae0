"""Answer one SQL query over a run, within limits of rows, bytes and memory.

Rows beyond the row limit are omitted with a note. An answer beyond the byte or memory limit is refused.
"""

import math
from pathlib import Path
from typing import Any, Final

import duckdb
import msgspec

from esper.files.row_files import TELEMETRY
from esper.karn.tables import QueryError, Tables, check_statement, error_text

FETCHED: Final = 100
"""Rows fetched from the database at once."""
MAX_BYTES: Final = 50_000_000
"""Largest answer as JSON, in bytes."""
MEMORY: Final = 4_000
"""Memory limit of the database, in MB."""


class SqlAnswer(msgspec.Struct):
    """Columns, types and rows of a query result, as JSON-compatible values."""

    columns: list[str]
    types: list[str]
    rows: list[list[Any]]
    note: str | None
    """Reason why rows are missing; None if the answer is complete."""


def answer_query(
    run_dir: Path, query: str, max_rows: int | None, max_bytes: int = MAX_BYTES, memory: int = MEMORY
) -> SqlAnswer:
    """Run a SQL query over the tables of a run.

    Args:
        run_dir: Directory of the run.
        query: One SELECT, WITH, DESCRIBE or SHOW statement.
        max_rows: Number of rows to return; None returns all.
        max_bytes: Largest answer, encoded as JSON.
        memory: Memory limit of the database in MB.

    Raises:
        QueryError: The statement is not allowed, fails, or exceeds a limit.
    """
    check_statement(query)
    try:
        found = Tables(run_dir / TELEMETRY, memory).ready_for(query).execute(query)
        described = found.description or []
        rows, note = _taken(found, max_rows, max_bytes)
    except (duckdb.OutOfMemoryException, MemoryError):
        raise QueryError(f"the query needs more than {memory} MB of memory; ask for less") from None
    except duckdb.Error as error:
        raise QueryError(f"the query cannot be answered: {error_text(error)}") from None
    names, types = [name for name, *_ in described], [str(kind) for _, kind, *_ in described]
    return SqlAnswer(names, types, rows, note)


def _taken(
    found: duckdb.DuckDBPyConnection, max_rows: int | None, max_bytes: int
) -> tuple[list[list[Any]], str | None]:
    """Return the first rows, and a note if more exist; raise ``QueryError`` above ``max_bytes``."""
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
