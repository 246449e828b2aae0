"""List of all runs below a folder, with progress and score."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from esper.files.row_files import TELEMETRY
from esper.karn import notation
from esper.karn.metric import SCORE
from esper.karn.questions.overview import Overview, done_text, overview
from esper.karn.run import State, open_run
from esper.leyline import EsperError, RunRow

ROW_FIELDS: Final = ("task", "controller", "rng_seed", "started", "metric")
PROGRESS_FIELDS: Final = ("unit", "done", "total", "seconds_left", "steps_per_second")
NUMBERS: Final = ("rng seed", "score", "twin", "params", "done")


class ListedRun(NamedTuple):
    """Entry of one run in the list of runs."""

    path: str
    state: State | Literal["damaged", "unread"]
    overview: Overview | None = None
    """Overview of the run; None if the run has no run row yet, was not read yet, or is damaged."""
    problem: str | None = None
    """Reason why the run cannot be read."""
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
    """Return the list entry of one run; a read error is stored in the entry."""
    try:
        run = open_run(path)
        if not run.rows(RunRow):
            return ListedRun(str(path), run.state)
        found = overview(run)
    except (EsperError, OSError) as error:
        return ListedRun(str(path), "damaged", problem=str(error))
    return ListedRun(str(path), found.progress.state, found)


def table_of(runs: Sequence[ListedRun]) -> Table:
    """Return the list of runs as a rich table."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("run", "task", "controller", *NUMBERS, "state", "started"):
        table.add_column(heading, no_wrap=True, justify="right" if heading in NUMBERS else "left")
    for run in runs:
        table.add_row(*map(Text, _cells(run)))
    return table


def _cells(run: ListedRun) -> list[str]:
    found = run.overview
    if found is None:
        return [run.path, *[notation.UNKNOWN] * 7, run.state, notation.UNKNOWN]
    row = found.row
    score, twin = map(found.metric.text, (found.score, found.twin))
    scores = [score if found.metric is SCORE else f"{found.metric.name} {score}", twin]
    place = [done_text(found.progress), run.state, row.started[:16].replace("T", " ")]
    origin = [row.task, row.controller, notation.UNKNOWN if row.rng_seed is None else str(row.rng_seed)]
    return [run.path, *origin, *scores, notation.count(found.params), *place]


def as_json(run: ListedRun) -> dict[str, Any]:
    """Return an entry of the list of runs as JSON values."""
    known = {"path": run.path, "state": run.state, "problem": run.problem}
    found = run.overview
    if found is None:
        return known
    sources = (
        (found.row, ROW_FIELDS),
        (found.progress, PROGRESS_FIELDS),
        (found, ("score", "twin", "params")),
    )
    return known | {name: getattr(source, name) for source, names in sources for name in names}
