"""The typed rows of a run by its directory, for whoever needs no more than that."""

from pathlib import Path
from typing import TypeVar

from esper.karn.run import open_run
from esper.leyline.events import Row

R = TypeVar("R", bound=Row)


def read_rows(run_dir: Path | str, row_type: type[R]) -> list[R]:
    """All rows of a table, oldest first; empty when the run wrote none."""
    return open_run(run_dir).rows(row_type)
