"""Is the run alive, how far is it, and when will it be done: the one answer that every view shows."""

from typing import Final, NamedTuple

from esper.karn import notation
from esper.karn.questions.episode_selection import is_training
from esper.karn.questions.series import AxisName
from esper.karn.run import Run, State

PACE_ITERATIONS: Final = 10
"""The pace of a training is that of its last iterations."""


class RunProgress(NamedTuple):
    """How far a run is; None is unknown."""

    state: State
    unit: AxisName
    done: int
    total: int | None
    seconds: float | None
    """From its begin to its last row."""
    seconds_left: float | None
    """At the present pace; None where it does not go on."""
    steps_per_second: float | None
    """Host epochs of all environments, over the whole time."""

    @property
    def share(self) -> float | None:
        """Of the whole run, that is done."""
        return min(self.done / self.total, 1.0) if self.total else None


def progress(run: Run) -> RunProgress:
    """The present state of the whole run."""
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
    if is_training(run):
        latest = f"(SELECT * FROM update ORDER BY iteration DESC LIMIT {PACE_ITERATIONS})"
        ((iterations, pace),) = run.sql(f"SELECT max(iteration), avg(seconds) FROM {latest}").fetchall()
        done, total = iterations or 0, row.iterations
    left = None
    if state == "running" and pace is not None and total is not None:
        left = pace * max(total - done, 0)
    return RunProgress(
        state=state,
        unit="iteration" if is_training(run) else "epoch",
        done=done,
        total=total,
        seconds=seconds,
        seconds_left=left,
        steps_per_second=trained / seconds if seconds and trained else None,
    )


def _epochs(run: Run) -> tuple[int, int]:
    """Epochs trained, and epochs done with: an episode that ended early leaves nothing to do."""
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
    """What is done of what is planned."""
    total = "" if found.total is None else f"/{notation.count(found.total)}"
    return f"{found.unit} {notation.count(found.done)}{total}"
