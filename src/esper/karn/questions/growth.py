"""Does growth pay: scores of all episodes beside those of their do-nothing twins, and what they grew to."""

from __future__ import annotations

from dataclasses import dataclass

from esper.karn.questions.episodes import IN_A_COMPLETE_ITERATION, LASTED, EpisodeKey
from esper.karn.questions.places import Axis, AxisName, Place, axis_of
from esper.karn.run import Run
from esper.karn.statistics import SQL_MEAN


@dataclass(frozen=True, slots=True)
class GrowthPoint:
    """The episodes at one place."""

    place: Place
    episodes: int
    low: float
    quarter: float
    median: float
    three_quarters: float
    high: float
    score: float | None
    """Mean of the episodes; of a training's, of those that lasted. None: none did."""
    twin: float | None
    """Mean of the twins' scores in the same episodes; None: no twin is known."""
    params: float | None
    """Mean of the parameters of host and seeds together, in the same episodes."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Scores over the epochs of episodes, or over the iterations of a training."""

    axis: AxisName
    end: int
    """Where the axis ends: the horizon, or the planned number of iterations."""
    host_params: int
    points: tuple[GrowthPoint, ...]


def growth(run: Run, episode: EpisodeKey | None = None) -> Growth | None:
    """Of one episode or, without one, of the whole run; None: no score is known."""
    axis = axis_of(run, episode)
    points = _points(run, axis, axis.group(axis.place()))
    if not points:
        return None
    return Growth(axis.name, max(axis.end, points[-1].place.last), run.row.host_params, points)


def latest(run: Run) -> GrowthPoint | None:
    """The last epoch or iteration of a run by itself, however many of them are one point of a long line."""
    axis = axis_of(run, None)
    points = _points(run, axis, axis.place())
    return points[-1] if points else None


def _points(run: Run, axis: Axis, together: str) -> tuple[GrowthPoint, ...]:
    """The episodes at all places, those of which ``together`` (SQL) is equal as one point."""
    place = axis.place()
    table, twin, counted, judged = "epoch", "twin_score", axis.condition, "true"
    if axis.name == "iteration":
        table, twin, counted, judged = "episode", "twin_val_score", IN_A_COMPLETE_ITERATION, LASTED
    means = (f"{SQL_MEAN}({column}) FILTER (WHERE {judged})" for column in ("val_score", twin, "params"))
    found = run.sql(
        f"""
        SELECT min({place}), max({place}), count(DISTINCT (env, episode)), min(val_score),
               quantile_cont(val_score, 0.25), median(val_score), quantile_cont(val_score, 0.75),
               max(val_score), {", ".join(means)}
        FROM {table} WHERE {counted} GROUP BY {together} ORDER BY 1
        """,
        axis.parameters,
    ).fetchall()
    return tuple(GrowthPoint(Place(first, last), *values) for first, last, *values in found)
