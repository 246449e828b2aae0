"""The answer to one SQL query over a run, within limits of rows, bytes, memory and time.

Rows beyond their limit are left out with a note, since a look at the first ones is what such a query is
for. Whatever else is too much is refused.
"""

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import duckdb
import msgspec

from esper.karn.line_copies import sentence_of
from esper.karn.tables import QueryError, Tables, check_statement
from esper.leyline.run_files import TELEMETRY

FETCHED: Final = 100
"""Rows taken from the database at once."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a query may cost."""

    max_rows: int | None
    """None: all."""
    max_bytes: int
    """Of the answer as JSON."""
    seconds: float
    memory: int
    """MB."""

    @property
    def too_slow(self) -> str:
        return f"the query took longer than {self.seconds:g} s; ask for less"


class Answer(msgspec.Struct, kw_only=True):
    """What came of a query, in plain values."""

    columns: list[str]
    types: list[str]
    rows: list[list[Any]]
    note: str | None
    """Why rows were left out; None: these are all."""


def answer(run_dir: Path, query: str, limits: Limits, on_timeout: Callable[[], object]) -> Answer:
    """Ask a run; raises ``QueryError`` where that is not allowed or not possible.

    ``on_timeout`` is called by another thread and has to end the process: some of what a database does
    cannot be interrupted.
    """
    check_statement(query)
    timer = threading.Timer(limits.seconds, on_timeout)
    timer.daemon = True
    try:
        tables = Tables(run_dir / TELEMETRY, memory=limits.memory, threads=1)
        timer.start()
        found = tables.ready_for(query).execute(query)
        described = found.description or []
        rows, note = _taken(found, limits)
    except (duckdb.OutOfMemoryException, MemoryError):
        raise QueryError(f"the query needs more than {limits.memory} MB of memory; ask for less") from None
    except duckdb.Error as error:
        raise QueryError(f"the query cannot be answered: {sentence_of(error)}") from None
    finally:
        timer.cancel()
    return Answer(
        columns=[name for name, *_ in described],
        types=[str(kind) for _, kind, *_ in described],
        rows=rows,
        note=note,
    )


def _taken(found: duckdb.DuckDBPyConnection, limits: Limits) -> tuple[list[list[Any]], str | None]:
    """The first rows, and why there are not more; refuses rows that are too large together."""
    rows: list[list[Any]] = []
    size = 0
    while fetched := found.fetchmany(FETCHED):
        for values in fetched:
            if len(rows) == limits.max_rows:
                return rows, f"only the first {limits.max_rows:,} rows are shown"
            row = [_plain(value) for value in values]
            size += len(msgspec.json.encode(row))
            if size > limits.max_bytes:
                raise QueryError(
                    f"the answer is larger than {limits.max_bytes / 1e6:g} MB; add a LIMIT, name fewer"
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
