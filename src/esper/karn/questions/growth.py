"""Does growth pay: scores of all episodes beside those of their do-nothing twins, and the parameters.

The picture: a fan of scores with the twin as a dotted line, parameters as a step line below.
"""

from __future__ import annotations

from dataclasses import dataclass

from esper.karn import notation
from esper.karn.drawing.chart import Chart, Line, Panel, draw
from esper.karn.drawing.picture import Picture
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


def growth_by_place(run: Run) -> tuple[GrowthPoint, ...]:
    """Every epoch or iteration by itself, however many of them are one point of a long line."""
    axis = axis_of(run, None)
    return _points(run, axis, axis.place())


def latest(run: Run) -> GrowthPoint | None:
    """The last epoch or iteration by itself."""
    points = growth_by_place(run)
    return points[-1] if points else None


def _points(run: Run, axis: Axis, together: str) -> tuple[GrowthPoint, ...]:
    """The episodes at all places, those of which ``together`` (SQL) is equal as one point."""
    place = axis.place()
    table, twin, counted, averaged = "epoch", "twin_score", axis.condition, "true"
    if axis.name == "iteration":
        table, twin, counted, averaged = "episode", "twin_val_score", IN_A_COMPLETE_ITERATION, LASTED
    means = (f"{SQL_MEAN}({column}) FILTER (WHERE {averaged})" for column in ("val_score", twin, "params"))
    found = run.sql(
        f"""
        SELECT min({place}), max({place}), count(DISTINCT (env, episode, attempt)), min(val_score),
               quantile_cont(val_score, 0.25), median(val_score), quantile_cont(val_score, 0.75),
               max(val_score), {", ".join(means)}
        FROM {table} WHERE {counted} GROUP BY {together} ORDER BY 1
        """,
        axis.parameters,
    ).fetchall()
    return tuple(GrowthPoint(Place(first, last), *values) for first, last, *values in found)


def draw_growth(found: Growth, beside: Growth | None = None) -> Picture:
    """Scores above, parameters below."""
    return Picture(
        svg=draw(_chart(found), None if beside is None else _chart(beside)),
        columns=[
            *(found.axis, "episodes", "lowest", "25 %", "median", "75 %", "highest"),
            *("score", "twin", "parameters"),
        ],
        rows=[_cells(point) for point in found.points],
        caption=_caption(found),
    )


def _chart(found: Growth) -> Chart:
    points, last = found.points, found.points[-1]
    params = [point.params for point in points]
    bands = [([p.low for p in points], [p.high for p in points])]
    bands.append(([p.quarter for p in points], [p.three_quarters for p in points]))
    scores = [
        Line("twin", [point.twin for point in points], notation.points, "twin"),
        Line("score", [point.score for point in points], notation.points),
    ]
    size = f"{notation.count(last.params)} params"
    return Chart(
        title="Score and parameters",
        description=f"Score {notation.points(last.score)} and twin {notation.points(last.twin)}"
        f" at {found.axis} {last.place}, with {notation.count(last.params)} parameters.",
        axis=found.axis,
        end=found.end,
        places=[point.place for point in points],
        panels=[
            Panel(170, scores, bands if _has_fan(found) else (), near=0.0, most=100.0),
            Panel(60, [Line("parameters", params, notation.count, "steps", label=size)], zero=True, ticks=2),
        ],
        room=124,
    )


def _has_fan(found: Growth) -> bool:
    return any(point.high > point.low for point in found.points)


def _cells(point: GrowthPoint) -> list[str]:
    spread = (point.low, point.quarter, point.median, point.three_quarters, point.high)
    return [
        str(point.place),
        notation.count(point.episodes),
        *(notation.points(score) for score in (*spread, point.score, point.twin)),
        notation.count(point.params),
    ]


def _caption(found: Growth) -> str:
    last = found.points[-1]
    gain = notation.gain(notation.difference(last.score, last.twin))
    fan = ""
    if _has_fan(found):
        which = " of those that lasted" if found.axis == "iteration" else ""
        fan = f"Bands: all episodes, and their middle half; line: the mean{which}. "
    return (
        f"{fan}Dotted: the do-nothing twin. At {found.axis} {last.place} the score is"
        f" {notation.points(last.score)}, {gain} points over the twin, with"
        f" {notation.factor(last.params, found.host_params)} the host's {notation.count(found.host_params)}"
        " parameters."
    )
