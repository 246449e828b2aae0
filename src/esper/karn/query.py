"""The typed rows of a run by its directory, for whoever needs no more than that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar, overload

from esper.karn.run import open_run
from esper.leyline.errors import UnknownNameError
from esper.leyline.events import TABLES, Row

R = TypeVar("R", bound=Row)


@overload
def read_rows(run_dir: Path | str, table: type[R]) -> list[R]: ...


@overload
def read_rows(run_dir: Path | str, table: str) -> list[Row]: ...


def read_rows(run_dir: Path | str, table: type[Row] | str) -> Sequence[Row]:
    """All rows of a table, by its row type or its name, oldest first; empty when the run wrote none."""
    if isinstance(table, str):
        if table not in TABLES:
            raise UnknownNameError("table", table, TABLES)
        table = TABLES[table]
    return open_run(run_dir).rows(table)
