"""Is the run alive, how far is it, and when will it be done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from esper.karn.questions.episodes import is_training
from esper.karn.questions.places import AxisName
from esper.karn.run import Run, State

PACE_ITERATIONS: Final = 10
"""The pace of a training is that of its last iterations."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is; None is unknown."""

    name: str
    task: str
    controller: str
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


def progress(run: Run) -> Progress:
    """The present state of a run."""
    row, state = run.row, run.state
    ((seconds,),) = run.sql(
        "SELECT max(t) FROM (SELECT t FROM epoch UNION ALL SELECT t FROM episode"
        " UNION ALL SELECT t FROM update UNION ALL SELECT t FROM resource)"
    ).fetchall()
    lived, done = _epochs(run)
    total = _planned_epochs(run)
    pace = seconds / done if seconds and done else None
    if is_training(run):
        ((iterations,),) = run.sql("SELECT max(iteration) FROM update").fetchall()
        done, total, pace = iterations or 0, row.iterations, _seconds_per_iteration(run)
    goes_on = state == "running" and pace is not None and total is not None
    return Progress(
        name=row.name,
        task=row.task,
        controller=row.controller,
        state=state,
        unit="iteration" if is_training(run) else "epoch",
        done=done,
        total=total,
        seconds=seconds,
        seconds_left=pace * max(total - done, 0) if goes_on and pace and total else None,
        steps_per_second=lived / seconds if seconds and lived else None,
    )


def _epochs(run: Run) -> tuple[int, int]:
    """Epochs lived, and epochs done with: an episode that ended early leaves nothing to do."""
    ((lived, done),) = run.sql(
        """
        WITH episode AS (SELECT env, episode, max(epoch) AS epochs, bool_or(ended) AS ended
                      FROM (SELECT env, episode, epoch, false AS ended FROM epoch
                            UNION ALL SELECT env, episode, epoch, true FROM episode)
                      GROUP BY env, episode)
        SELECT coalesce(sum(epochs), 0), coalesce(sum(CASE WHEN ended THEN ? ELSE epochs END), 0) FROM episode
        """,
        [run.row.horizon],
    ).fetchall()
    return int(lived), int(done)


def _planned_epochs(run: Run) -> int | None:
    episodes = run.row.config.get("episodes")
    return episodes * run.row.envs * run.row.horizon if isinstance(episodes, int) else None


def _seconds_per_iteration(run: Run) -> float | None:
    ((pace,),) = run.sql(
        f"SELECT avg(seconds) FROM (SELECT seconds FROM update ORDER BY iteration DESC LIMIT {PACE_ITERATIONS})"
    ).fetchall()
    return None if pace is None else float(pace)
