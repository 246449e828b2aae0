"""Does growth pay: a fan of scores with the twin as a ghost line, parameters as a step line below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from esper.karn import notation
from esper.karn.figures import svg
from esper.karn.figures.axes import Scale, around, x_axis, y_axis
from esper.karn.figures.labels import Label, beside_lines
from esper.karn.figures.picture import Picture
from esper.karn.figures.svg import Markup
from esper.karn.questions.episodes import EpisodeKey
from esper.karn.questions.growth import Growth, GrowthPoint, growth
from esper.karn.run import Run

_LEFT: Final = 48.0
_RIGHT: Final = svg.WIDTH - 124
_SCORES: Final = (12.0, 182.0)
_PARAMS: Final = (212.0, 272.0)
_HEIGHT: Final = 298.0


def growth_picture(run: Run, episode: EpisodeKey | None = None) -> Picture | None:
    """The answer of one episode or of the whole run."""
    found = growth(run, episode)
    return None if found is None else draw_growth(found)


def draw_growth(found: Growth) -> Picture:
    """The picture of these scores."""
    x = Scale(0, found.end, _LEFT, _RIGHT)
    last = found.points[-1]
    return Picture(
        svg=svg.drawing(
            _HEIGHT,
            "Score and parameters",
            f"Score {notation.points(last.score)} and twin {notation.points(last.twin)}"
            f" at {found.axis} {last.place}, with {notation.count(last.params)} parameters.",
            x_axis(x, _PARAMS[1], found.axis, top=_SCORES[0]),
            _draw_scores(found.points, x),
            _draw_params(found, x),
        ),
        columns=[
            *(found.axis, "episodes", "lowest", "25 %", "median", "75 %", "highest"),
            *("score", "twin", "parameters"),
        ],
        rows=[_cells(point) for point in found.points],
        caption=_caption(found),
    )


def _caption(found: Growth) -> str:
    last = found.points[-1]
    gain = notation.gain(notation.difference(last.score, last.twin))
    fan = ""
    if _has_fan(found.points):
        which = " of those that lasted" if found.axis == "iteration" else ""
        fan = f"Bands: all episodes, and their middle half; line: the mean{which}. "
    return (
        f"{fan}Dotted: the do-nothing twin. At {found.axis} {last.place} the score is"
        f" {notation.points(last.score)}, {gain} points over the twin, with"
        f" {notation.factor(last.params, found.host_params)} the host's {notation.count(found.host_params)}"
        " parameters."
    )


def _has_fan(points: Sequence[GrowthPoint]) -> bool:
    return any(point.high > point.low for point in points)


def _cells(point: GrowthPoint) -> list[str]:
    spread = (point.low, point.quarter, point.median, point.three_quarters, point.high)
    return [
        str(point.place),
        notation.count(point.episodes),
        *(notation.points(score) for score in (*spread, point.score, point.twin)),
        notation.count(point.params),
    ]


def _draw_scores(points: Sequence[GrowthPoint], x: Scale) -> Markup:
    twins = [point.twin for point in points if point.twin is not None]
    low, high = around([*(p.low for p in points), *(p.high for p in points), *twins], 4, floor=0.0)
    y = Scale(low, min(high, 100.0), _SCORES[1], _SCORES[0])
    places = [x(point.place.last) for point in points]
    last = points[-1]
    labels = []
    if last.score is not None:
        labels.append(Label(f"score {notation.points(last.score)}", y(last.score), "strong halo"))
    if last.twin is not None:
        labels.append(Label(f"twin {notation.points(last.twin)}", y(last.twin), "ghost halo"))
    score_line, twin_line = (
        [None if value is None else (at, y(value)) for at, value in zip(places, values, strict=True)]
        for values in ([point.score for point in points], [point.twin for point in points])
    )
    fan: list[str] = []
    if _has_fan(points):
        outer = svg.fan(places, [y(p.high) for p in points], [y(p.low) for p in points])
        inner = svg.fan(places, [y(p.three_quarters) for p in points], [y(p.quarter) for p in points])
        fan = [svg.path(outer, "fan"), svg.path(inner, "fan inner")]
    return svg.group(
        [
            y_axis(y, _LEFT, _RIGHT),
            *fan,
            svg.curve(twin_line, "twin"),
            svg.curve(score_line, "line"),
            beside_lines(places[-1] + 8, labels),
        ]
    )


def _draw_params(found: Growth, x: Scale) -> Markup:
    """The parameters within each epoch or iteration, the last known ones where no episode lasted."""
    known = [(point.place, point.params) for point in found.points if point.params is not None]
    if not known:
        return Markup("")
    most = max(*(params for _, params in known), found.host_params)
    y = Scale(0, around([0.0, most], 2)[1], _PARAMS[1], _PARAMS[0])
    start = x(known[0][0].first - 1)
    end, last = known[-1]
    name = f"{notation.count(last)} params"
    line = svg.steps(start, [(x(place.last), y(params)) for place, params in known])
    return svg.group(
        [
            y_axis(y, _LEFT, _RIGHT, most=3),
            svg.path(line, "line"),
            beside_lines(x(end.last) + 8, [Label(name, y(last), "halo")]),
        ]
    )
