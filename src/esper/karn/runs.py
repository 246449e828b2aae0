"""Status of a run (progress, score, score of the twin without growth, parameters), its overview, which adds
learning curves and open alerts, and the list of all runs in a folder and its subfolders.

The list of runs shows the status of each run. The head of a run's page and the terminal screen show the
overview.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from esper.files.row_files import TELEMETRY
from esper.karn import notation
from esper.karn.metric import SCORE, Metric, metric_of
from esper.karn.questions.alerts import AlertEntry, alerts
from esper.karn.questions.episode_selection import EpisodeKey
from esper.karn.questions.learning_curves import growth
from esper.karn.questions.series import AxisName, Values
from esper.karn.run import DAMAGE, Run, open_run
from esper.karn.run_result import final_rows
from esper.karn.statistics import mean
from esper.karn.stored_rows import State, StoredRows
from esper.leyline.errors import EsperError, printable
from esper.leyline.rows import EpisodeRow, EpochRow, ResourceRow, Row, RunRow, Severity, UpdateRow

PACE_ITERATIONS: Final = 10
"""Number of latest iterations whose mean duration is used to estimate the remaining time of a training."""
ROW_FIELDS: Final = ("task", "controller", "rng_seed", "started", "metric")
PROGRESS_FIELDS: Final = ("unit", "done", "total", "seconds_left", "steps_per_second")
COLUMNS: Final = ("task", "controller", "rng seed", "score", "twin", "params", "done", "state", "started")
"""Columns of the list of runs after the path."""
LINE: Final = "{:{path}}  {:15}  {:10}  {:>8}  {:>10}  {:>5}  {:>9}  {:>15}  {:8}  {:16}"
"""Format of a line: path, and columns with their widths; columns of numbers are aligned right."""


class RunProgress(NamedTuple):
    """Progress of a run; a value of None is unknown."""

    state: State
    unit: AxisName
    done: int
    total: int | None
    seconds: float | None
    """Seconds from the start of the run to its last row."""
    seconds_left: float | None
    """Estimated seconds to the end of the run at its present speed; None unless the run is in progress."""
    steps_per_second: float | None
    """Trained epochs of all environments per second, over the whole run; a training counts those of finished
    episodes.
    """

    @property
    def share(self) -> float | None:
        """Completed fraction of the run; None if its length is unknown."""
        return min(self.done / self.total, 1.0) if self.total else None


def progress(run: Run, stored: StoredRows | None = None) -> RunProgress:
    """Return state, duration and remaining time of a run, and the numbers of its completed and planned epochs
    or iterations.

    Args:
        run: Run to read.
        stored: Rows of a moment; by default those of now.
    """
    row, stored = run.row, stored or run.look()
    state, updates, episodes = stored.state, stored.rows(UpdateRow), stored.rows(EpisodeRow)
    epochs = _epochs(row, stored)
    seconds = max((one.t for one in (*epochs, *episodes, *updates, *stored.rows(ResourceRow))), default=None)
    reached = {EpisodeKey.of(one): one.epoch for one in (*epochs, *episodes)}
    trained = sum(reached.values())
    unit: AxisName = "iteration"
    if row.iterations is not None:
        done, total = max((one.iteration for one in updates), default=0), row.iterations
        pace = mean(one.seconds for one in updates[-PACE_ITERATIONS:])
    else:
        unit, total = "epoch", None
        # A finished episode counts with all epochs of its horizon.
        ended = {EpisodeKey.of(one): row.horizon for one in episodes if row.horizon is not None}
        done = sum((reached | ended).values())
        pace = seconds / done if seconds and done else None
        if isinstance(planned := row.config.get("episodes"), int) and row.horizon is not None:
            total = planned * row.envs * row.horizon
    left = None
    if state == "running" and pace is not None and total is not None:
        left = pace * max(total - done, 0)
    steps_per_second = trained / seconds if seconds and trained else None
    return RunProgress(state, unit, done, total, seconds, left, steps_per_second)


def _epochs(row: RunRow, stored: StoredRows) -> Sequence[EpochRow]:
    """Return the epoch rows of a run; none of a training, which has many and repeats them in episode rows."""
    return stored.rows(EpochRow) if row.iterations is None else ()


def done_text(found: RunProgress) -> str:
    """Format the completed and the planned number of epochs or iterations, such as "epoch 7/20"."""
    total = "" if found.total is None else f"/{notation.count(found.total)}"
    return f"{found.unit} {notation.count(found.done)}{total}"


@dataclass(frozen=True)
class RunStatus:
    """Progress, scores and parameters of a run; a value of None is unknown.

    Scores and parameters are those of the last epoch or iteration while the run is in progress, else the
    final ones.
    """

    row: RunRow
    progress: RunProgress
    score: float | None
    twin: float | None
    params: float | None

    @property
    def lead(self) -> float | None:
        """Difference of the run's score from the twin's score; positive for an improvement."""
        return self.metric.lead(self.score, self.twin)

    @property
    def metric(self) -> Metric:
        """Metric in which the scores of the run and of its twin are measured."""
        return metric_of(self.row)


def run_status(run: Run) -> RunStatus:
    """Return the status of a run, which is computed without opening a database for JSON lines."""
    row, stored = run.row, run.look()
    found = progress(run, stored)
    latest: Sequence[Row] = ()
    if row.iterations is not None or found.state != "running":
        latest, twin = final_rows(run, stored), "twin_val_score"
    if not latest:
        epochs, twin = _epochs(row, stored), "twin_score"
        last = max((one.epoch for one in epochs), default=None)
        latest = [one for one in epochs if one.epoch == last]
    columns = metric_of(row).column, twin, "params"
    return RunStatus(row, found, *(mean(getattr(one, column) for one in latest) for column in columns))


@dataclass(frozen=True)
class Overview(RunStatus):
    """Status of a run with its learning curves and open alerts."""

    scores: Values
    twins: Values
    """Scores of the run and of the twin without growth, by epoch or iteration."""
    alerts: tuple[AlertEntry, ...]
    """Alerts of the run that are open."""

    @property
    def alert_counts(self) -> dict[Severity, int]:
        """Number of open alerts by severity."""
        return dict(Counter(entry.severity for entry in self.alerts))


def overview(run: Run) -> Overview:
    """Return the overview of a run."""
    found, grown = run_status(run), growth(run)
    scores, twins = (grown["score"], grown["twin"]) if grown else ((), ())
    opened = tuple(entry for entry in alerts(run).entries if entry.until is None)
    return Overview(**vars(found), scores=scores, twins=twins, alerts=opened)


# --- list of runs -------------------------------------------------------------------------------------


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
