"""Progress of a run, and its overview: score, twin, parameters and open alerts.

The list of runs, the head of a run's page and the terminal show a run's overview.
"""

from collections import Counter
from typing import Final, NamedTuple

from esper.karn import notation
from esper.karn.metric import Metric, metric_of
from esper.karn.questions.alerts import AlertEntry, alerts
from esper.karn.questions.learning_curves import growth
from esper.karn.questions.series import AxisName, Values
from esper.karn.run import Run, State
from esper.karn.run_result import result
from esper.leyline.rows import RunRow, Severity

PACE_ITERATIONS: Final = 10
"""Number of last iterations over which the pace of a training is measured."""


class RunProgress(NamedTuple):
    """Progress of a run; a value of None is unknown."""

    state: State
    unit: AxisName
    done: int
    total: int | None
    seconds: float | None
    """Seconds from the start of the run to its last row."""
    seconds_left: float | None
    """Estimated seconds to the end of the run at the current pace; None unless the run is in progress."""
    steps_per_second: float | None
    """Host epochs of all environments per second, over the whole run."""

    @property
    def share(self) -> float | None:
        """Completed fraction of the run."""
        return min(self.done / self.total, 1.0) if self.total else None


def progress(run: Run) -> RunProgress:
    """Return the progress of a run."""
    row, state = run.row, run.state
    ((seconds,),) = run.sql(
        "SELECT max(t) FROM (SELECT t FROM epoch UNION ALL SELECT t FROM episode"
        " UNION ALL SELECT t FROM update UNION ALL SELECT t FROM resource)"
    ).fetchall()
    trained, done = _epochs(run)
    episodes = row.config.get("episodes")
    total = None
    if isinstance(episodes, int) and row.horizon is not None:
        total = episodes * row.envs * row.horizon
    pace = seconds / done if seconds and done else None
    if run.is_training:
        latest = f"(SELECT * FROM update ORDER BY iteration DESC LIMIT {PACE_ITERATIONS})"
        ((iterations, pace),) = run.sql(f"SELECT max(iteration), avg(seconds) FROM {latest}").fetchall()
        done, total = iterations or 0, row.iterations
    left = None
    if state == "running" and pace is not None and total is not None:
        left = pace * max(total - done, 0)
    unit: AxisName = "iteration" if run.is_training else "epoch"
    steps_per_second = trained / seconds if seconds and trained else None
    return RunProgress(state, unit, done, total, seconds, left, steps_per_second)


def _epochs(run: Run) -> tuple[int, int]:
    """Return the number of trained epochs, and the same number with episodes that ended early counted as a
    whole horizon.
    """
    ((trained, done),) = run.sql(
        """
        WITH ended AS (SELECT env, episode, attempt, max(epoch) AS epochs, bool_or(is_end) AS is_over
                       FROM (SELECT env, episode, attempt, epoch, false AS is_end FROM epoch
                             UNION ALL SELECT env, episode, attempt, epoch, true FROM episode)
                       GROUP BY env, episode, attempt)
        SELECT coalesce(sum(epochs), 0),
               coalesce(sum(CASE WHEN is_over THEN coalesce(?, epochs) ELSE epochs END), 0)
        FROM ended
        """,
        [run.row.horizon],
    ).fetchall()
    return int(trained), int(done)


def done_text(found: RunProgress) -> str:
    """Format the completed and the planned number of epochs or iterations."""
    total = "" if found.total is None else f"/{notation.count(found.total)}"
    return f"{found.unit} {notation.count(found.done)}{total}"


class Overview(NamedTuple):
    """Overview of a run; a value of None is unknown."""

    row: RunRow
    progress: RunProgress
    score: float | None
    twin: float | None
    params: float | None
    scores: Values
    twins: Values
    """Scores of the run and of the twin, by epoch or iteration."""
    alerts: tuple[AlertEntry, ...]
    """Alerts of the run that are open."""

    @property
    def lead(self) -> float | None:
        """Lead of the score over the twin."""
        return self.metric.lead(self.score, self.twin)

    @property
    def metric(self) -> Metric:
        """Metric of score and twin."""
        return metric_of(self.row)

    @property
    def alert_counts(self) -> dict[Severity, int]:
        """Number of open alerts by severity."""
        return dict(Counter(entry.severity for entry in self.alerts))


def overview(run: Run) -> Overview:
    """Return the overview of a run: from the last epoch or iteration while in progress, else from its
    result.
    """
    found, grown = progress(run), growth(run)
    scores, twins = (grown["score"], grown["twin"]) if grown else ((), ())
    opened = tuple(entry for entry in alerts(run).entries if entry.until is None)
    return Overview(run.row, found, *_numbers(run, found), scores, twins, opened)


def _numbers(run: Run, found: RunProgress) -> tuple[float | None, float | None, float | None]:
    episodes = None if found.state == "running" else result(run)
    if episodes is not None:
        score, twin = (one and one.mean for one in (episodes.validation, episodes.twin_score))
        return score, twin, episodes.params.mean
    if (grown := growth(run, joined=False)) is None:
        return None, None, None
    return grown.last("score"), grown.last("twin"), grown.last("parameters")
