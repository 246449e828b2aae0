"""Reader of one run: its run row, state, rows and tables, during the run or later."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

import duckdb
import msgspec

from esper.files.row_files import TELEMETRY
from esper.files.writer_lock import is_being_written
from esper.karn.tables import QueryError, Tables, check_statement, error_text, views_in
from esper.leyline.columns import TABLE_OF
from esper.leyline.errors import UNREADABLE, EsperError, UnknownNameError
from esper.leyline.rows import Row, RunRow

R = TypeVar("R", bound=Row)
State = Literal["running", "finished", "stopped"]


def open_run(path: Path | str) -> Run:
    """Open the run in a directory; the run may still be in progress.

    Raises:
        EsperError: The directory is missing or is not a run directory.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise EsperError(f"there is no run directory '{directory}'")
    if not (directory / TELEMETRY).is_dir():
        raise EsperError(f"'{directory}' is not a run's directory: it holds no folder '{TELEMETRY}'")
    return Run(directory)


def read_rows(run_dir: Path | str, row_type: type[R]) -> list[R]:
    """Return all rows of a table of the run in a directory, oldest first."""
    return open_run(run_dir).rows(row_type)


class Run:
    """Telemetry of a run; every call reads the current files. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _tables(self) -> Tables:
        return Tables(self.path / TELEMETRY)

    @cached_property
    def row(self) -> RunRow:
        """Run row: configuration, and the names behind all indices."""
        for row in self.rows(RunRow):
            return row
        raise EsperError(f"the run in '{self.path}' has not written its own row yet")

    @property
    def state(self) -> State:
        """State derived from the files: a live writer holds the lock, a finished run has all planned rows."""
        if is_being_written(self.path / TELEMETRY):
            return "running"
        if not self.rows(RunRow):
            return "stopped"
        row, written, planned = self.row, "max(iteration) FROM update", self.row.iterations
        if planned is None and (episodes := row.config.get("episodes")) is not None:
            written, planned = "count(*) FROM episode", episodes * row.envs
        ((done,),) = self.sql(f"SELECT {written}").fetchall()
        return "finished" if planned is not None and (done or 0) >= planned else "stopped"

    def rows(self, row_type: type[R], where: str | None = None, parameters: Sequence[object] = ()) -> list[R]:
        """Return the rows of a table, oldest first.

        Args:
            row_type: Row type of the table.
            where: Condition in SQL; None returns all rows.
            parameters: Values for the ``?`` of the condition.

        Raises:
            QueryError: The condition is not valid SQL.
            EsperError: A row cannot be read.
        """
        if row_type not in TABLE_OF:
            raise UnknownNameError("row type", row_type.__name__, (known.__name__ for known in TABLE_OF))
        table = TABLE_OF[row_type]
        query = f'SELECT to_json(found) FROM (SELECT * FROM "{table}" WHERE {where or "true"}) found'
        connection = self._tables.current([table, *views_in(where or "")])
        try:
            found = connection.execute(query, list(parameters)).fetchall()
        except duckdb.Error as error:
            raise QueryError(f"the rows of '{table}' cannot be read: {error_text(error)}") from None
        return _decoded(table, row_type, [text for (text,) in found])

    def sql(self, query: str, parameters: Sequence[object] = ()) -> duckdb.DuckDBPyRelation:
        """Return the result of one SELECT over the run's tables and the view ``decisions``.

        Example: ``open_run("runs/mine").sql("SELECT max(val_score) FROM epoch").fetchall()``
        """
        check_statement(query)
        connection = self._tables.ready_for(query)
        try:
            return connection.sql(query, params=list(parameters))
        except duckdb.Error as error:
            raise QueryError(f"the query cannot be answered: {error_text(error)}") from None

    def table(self, name: str) -> duckdb.DuckDBPyRelation:
        """Return a whole table, or the view ``decisions``."""
        return self._tables.current([name]).table(name)


def _decoded(table: str, row_type: type[R], texts: Sequence[str]) -> list[R]:
    decoder = msgspec.json.Decoder(row_type)
    rows = []
    for number, text in enumerate(texts, start=1):
        try:
            rows.append(decoder.decode(text))
        except UNREADABLE as error:
            raise EsperError(f"row {number} of table '{table}' is not one: {error}") from None
    return rows
