"""The answer to one SQL query over a run, within limits of rows, bytes and memory.

Rows beyond their limit are left out with a note, since a look at the first ones is what such a query is
for. Whatever else is too much is refused.
"""

import math
from pathlib import Path
from typing import Any, Final

import duckdb
import msgspec

from esper.karn.jsonl_tables import error_text
from esper.karn.tables import QueryError, Tables, check_statement
from esper.leyline.run_files import TELEMETRY

FETCHED: Final = 100
"""Rows taken from the database at once."""
MAX_BYTES: Final = 50_000_000
"""Of the answer as JSON."""
MEMORY: Final = 4_000
"""MB that the database may take."""


class SqlAnswer(msgspec.Struct):
    """What came of a query, in plain values."""

    columns: list[str]
    types: list[str]
    rows: list[list[Any]]
    note: str | None
    """Why rows were left out; None: these are all."""


def answer_query(
    run_dir: Path, query: str, max_rows: int | None, max_bytes: int = MAX_BYTES, memory: int = MEMORY
) -> SqlAnswer:
    """Ask a run for so many rows, or for all; raises ``QueryError`` where that is not allowed or possible."""
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
    """The first rows, and why there are not more; refuses rows that are too large together."""
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
    """A value as JSON has it; numbers too large for it and dates become text."""
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | str) or (isinstance(value, int) and abs(value) < 2**63):
        return value
    return str(value)
