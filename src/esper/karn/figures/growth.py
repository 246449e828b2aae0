"""Does growth pay: a fan of scores with the twin as a ghost line, parameters as a step line below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from esper.karn import notation
from esper.karn.figures import svg
from esper.karn.figures.axes import Scale, apart, around, x_axis, y_axis
from esper.karn.figures.picture import Picture
from esper.karn.figures.svg import Markup
from esper.karn.questions.growth import Growth, GrowthPoint, growth
from esper.karn.questions.lives import LifeKey
from esper.karn.run import Run

_LEFT: Final = 48.0
_RIGHT: Final = svg.WIDTH - 118
_SCORES: Final = (12.0, 182.0)
_PARAMS: Final = (212.0, 272.0)
_HEIGHT: Final = 298.0


def growth_picture(run: Run, life: LifeKey | None = None) -> Picture | None:
    """The answer of one life or of the whole run."""
    found = growth(run, life)
    return None if found is None else draw_growth(found)


def draw_growth(found: Growth) -> Picture:
    """The picture of these scores."""
    x = Scale(0 if found.axis == "epoch" else min(1, found.end), found.end, _LEFT, _RIGHT)
    last = found.points[-1]
    return Picture(
        svg=svg.drawing(
            _HEIGHT,
            "Score and parameters",
            f"Median score {notation.points(last.median)} and twin {notation.points(last.twin)}"
            f" at {found.axis} {last.last}, with {notation.count(round(last.params))} parameters.",
            x_axis(x, _PARAMS[1], found.axis, top=_SCORES[0]),
            _draw_scores(found, x),
            _draw_params(found, x),
        ),
        columns=[found.axis, "lives", "lowest", "25 %", "median", "75 %", "highest", "twin", "parameters"],
        rows=[_cells(point) for point in found.points],
        caption=_caption(found),
    )


def _caption(found: Growth) -> str:
    last = found.points[-1]
    gain = notation.gain(notation.difference(last.median, last.twin))
    many = max(point.lives for point in found.points) > 1
    fan = "Bands: all lives, and their middle half; line: median. " if many else ""
    return (
        f"{fan}Dotted: the do-nothing twin. At {found.axis} {last.last} the score is"
        f" {notation.points(last.median)}, {gain} points over the twin, with"
        f" {notation.factor(last.params, found.host_params)} the host's {notation.count(found.host_params)}"
        " parameters."
    )


def _cells(point: GrowthPoint) -> list[str]:
    scores = (point.low, point.quarter, point.median, point.three_quarters, point.high, point.twin)
    return [
        place(point.first, point.last),
        notation.count(point.lives),
        *(notation.points(score) for score in scores),
        notation.count(round(point.params)),
    ]


def place(first: int, last: int) -> str:
    """Where on the axis: one epoch or round, or several that were taken together."""
    return str(first) if first == last else f"{first}–{last}"


def _draw_scores(found: Growth, x: Scale) -> Markup:
    points = found.points
    twins = [point.twin for point in points if point.twin is not None]
    low, high = around([*(p.low for p in points), *(p.high for p in points), *twins], 4, floor=0.0)
    y = Scale(low, min(high, 100.0), _SCORES[1], _SCORES[0])

    def at(values: Sequence[float | None]) -> list[svg.Point | None]:
        return [
            None if value is None else (x(point.last), y(value))
            for point, value in zip(points, values, strict=True)
        ]

    def between(upper: Sequence[float], lower: Sequence[float]) -> str:
        tops = [(x(point.last), y(value)) for point, value in zip(points, upper, strict=True)]
        ends = [(x(point.last), y(value)) for point, value in zip(points, lower, strict=True)]
        return svg.band(tops, ends)

    fans: list[str] = []
    if any(point.lives > 1 for point in points):
        fans = [
            svg.path(between([p.high for p in points], [p.low for p in points]), "fan"),
            svg.path(between([p.three_quarters for p in points], [p.quarter for p in points]), "fan inner"),
        ]
    return svg.group(
        [
            y_axis(y, _LEFT, _RIGHT),
            *fans,
            svg.path(svg.polyline(at([p.twin for p in points])), "twin"),
            svg.path(svg.polyline(at([p.median for p in points])), "line"),
            *_labels(points[-1], y, x(points[-1].last)),
        ]
    )


def _labels(last: GrowthPoint, y: Scale, x: float) -> list[Markup]:
    """What the lines are, with their last values, at their ends."""
    named = [(f"score {notation.points(last.median)}", last.median, "strong halo")]
    if last.twin is not None:
        named.append((f"twin {notation.points(last.twin)}", last.twin, "ghost halo"))
    heights = apart([y(value) for _, value, _ in named])
    return [
        svg.text(x + 7, height + 4, label, look)
        for (label, _, look), height in zip(named, heights, strict=True)
    ]


def _draw_params(found: Growth, x: Scale) -> Markup:
    points = found.points
    most = max(*(point.params for point in points), found.host_params)
    y = Scale(0, around([0.0, most], 2)[1], _PARAMS[1], _PARAMS[0])
    born: list[svg.Point] = [(x(0), y(found.host_params))] if found.axis == "epoch" else []
    line = [*born, *((x(point.last), y(point.params)) for point in points)]
    last = points[-1]
    return svg.group(
        [
            y_axis(y, _LEFT, _RIGHT, most=2),
            svg.path(svg.steps(line), "line"),
            svg.text(
                x(last.last) + 7, y(last.params) + 4, f"{notation.count(round(last.params))} params", "halo"
            ),
        ]
    )
