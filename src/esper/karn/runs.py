"""List of all runs in a folder and its subfolders, with progress and score."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from esper.files.row_files import TELEMETRY
from esper.karn import notation
from esper.karn.metric import SCORE
from esper.karn.questions.overview import RunStatus, done_text, run_status
from esper.karn.run import DAMAGE, open_run
from esper.karn.stored_rows import State
from esper.leyline.errors import EsperError
from esper.leyline.printable import printable

ROW_FIELDS: Final = ("task", "controller", "rng_seed", "started", "metric")
PROGRESS_FIELDS: Final = ("unit", "done", "total", "seconds_left", "steps_per_second")
COLUMNS: Final = ("task", "controller", "rng seed", "score", "twin", "params", "done", "state", "started")
"""Columns of the list of runs after the path."""
LINE: Final = "{:{path}}  {:15}  {:10}  {:>8}  {:>10}  {:>5}  {:>9}  {:>15}  {:8}  {:16}"
"""Format of a line: path, and columns with their widths; columns of numbers are aligned right."""


class ListedRun(NamedTuple):
    """Entry of one run in the list of runs."""

    path: str
    state: State | Literal["damaged", "unread"]
    run_status: RunStatus | None = None
    """Status of the run; None if the run has no run row yet, was not read yet, or is damaged."""
    problem: str | None = None
    """Reason why the run cannot be read; None if it is readable."""
    id: str = ""
    """Id of the run in the addresses of the server."""


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the run directories at any depth of ``folder``, sorted by name; hidden folders are skipped."""
    if not folder.is_dir():
        raise EsperError(f"there is no folder '{folder}'; name the one that holds your runs")
    for parent, folders, _ in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if TELEMETRY in folders:
            folders.clear()
            yield Path(parent)


def listed(path: Path) -> ListedRun:
    """Return the entry of one run for the list of runs; a read error is stored in the entry."""
    try:
        run = open_run(path)
        stored = run.look()
        if stored.run_row is None:
            return ListedRun(str(path), stored.state)
        found = run_status(run)
    except DAMAGE as error:
        return ListedRun(str(path), "damaged", problem=str(error))
    return ListedRun(str(path), found.progress.state, found)


def list_lines(runs: Iterable[ListedRun], width: int) -> Iterator[str]:
    """Yield the list of runs as lines, each as soon as its run was read; a damaged run has a second line.

    Args:
        runs: Entries of the list.
        width: Width of the column of paths in characters.
    """
    yield _line(("run", *COLUMNS), width)
    for run in runs:
        yield _line(_cells(run), width)
        if run.problem is not None:
            yield printable(f"damaged: {run.problem}")


def _line(cells: Sequence[str], width: int) -> str:
    return LINE.format(*map(printable, cells), path=width).rstrip()


def _cells(run: ListedRun) -> list[str]:
    found = run.run_status
    if found is None:
        return [run.path, *[notation.UNKNOWN] * 7, run.state, notation.UNKNOWN]
    row = found.row
    score, twin = map(found.metric.text, (found.score, found.twin))
    scores = [score if found.metric is SCORE else f"{found.metric.name} {score}", twin]
    place = [done_text(found.progress), run.state, row.started[:16].replace("T", " ")]
    origin = [row.task, row.controller, notation.written(row.rng_seed)]
    return [run.path, *origin, *scores, notation.count(found.params), *place]


def as_json(run: ListedRun) -> dict[str, Any]:
    """Return an entry of the list of runs as JSON values."""
    known = {"path": run.path, "state": run.state, "problem": run.problem}
    found = run.run_status
    if found is None:
        return known
    sources = (
        (found.row, ROW_FIELDS),
        (found.progress, PROGRESS_FIELDS),
        (found, ("score", "twin", "params")),
    )
    return known | {name: getattr(source, name) for source, names in sources for name in names}
