"""Does growth pay: scores of all lives beside those of their do-nothing twins, and what they grew to."""

from __future__ import annotations

from dataclasses import dataclass

from esper.karn.questions.lives import LifeKey
from esper.karn.questions.places import AxisName, Place, axis_of
from esper.karn.run import Run


@dataclass(frozen=True, slots=True)
class GrowthPoint:
    """The lives at one place."""

    place: Place
    lives: int
    low: float
    quarter: float
    median: float
    three_quarters: float
    high: float
    twin: float | None
    """Median of the twins' scores; None: no twin is known."""
    params: float
    """Median of the parameters of host and seeds together."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Scores over the epochs of lives, or over the rounds of a training."""

    axis: AxisName
    end: int
    """Where the axis ends: the horizon, or the planned number of rounds."""
    host_params: int
    points: tuple[GrowthPoint, ...]


def growth(run: Run, life: LifeKey | None = None) -> Growth | None:
    """Of one life or, without one, of the whole run; None: no score is known."""
    axis = axis_of(run, life)
    place = axis.place()
    table, twin = ("episode", "twin_val_score") if axis.name == "round" else ("epoch", "twin_score")
    found = run.sql(
        f"""
        SELECT min({place}), max({place}), count(DISTINCT (env, episode)), min(val_score),
               quantile_cont(val_score, 0.25), median(val_score), quantile_cont(val_score, 0.75),
               max(val_score), median({twin}), median(params)
        FROM {table} WHERE {axis.condition} GROUP BY {axis.group(place)} ORDER BY 1
        """,
        axis.parameters,
    ).fetchall()
    if not found:
        return None
    points = tuple(GrowthPoint(Place(first, last), *values) for first, last, *values in found)
    return Growth(axis.name, max(axis.end, points[-1].place.last), run.row.host_params, points)
