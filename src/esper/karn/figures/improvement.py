"""Is the controller improving: returns of every iteration above, scores with those of others below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from esper.karn import notation
from esper.karn.figures import svg
from esper.karn.figures.axes import Scale, around, x_axis, y_axis
from esper.karn.figures.labels import Label, beside_lines
from esper.karn.figures.picture import Picture
from esper.karn.figures.svg import Markup, Point
from esper.karn.questions.episodes import EpisodeKey
from esper.karn.questions.improvement import NO_REFERENCES, Improvement, ImprovementPoint, improvement
from esper.karn.run import Run

_LEFT: Final = 62.0
_RIGHT: Final = svg.WIDTH - 150
_RETURNS: Final = (12.0, 142.0)
_SCORES: Final = (172.0, 302.0)
_HEIGHT: Final = 328.0


def improvement_picture(
    run: Run, episode: EpisodeKey | None = None, references: Mapping[str, float] = NO_REFERENCES
) -> Picture | None:
    """The answer of the whole training, whichever episode is looked at, beside scores of others."""
    found = improvement(run, references)
    return None if found is None else draw_improvement(found)


def draw_improvement(found: Improvement) -> Picture:
    """The picture of these iterations."""
    x = Scale(0, found.iterations, _LEFT, _RIGHT)
    last = found.points[-1]
    return Picture(
        svg=svg.drawing(
            _HEIGHT,
            "Return and score per iteration",
            f"Median return {notation.gain(last.median, 2)}, mean score {notation.points(last.score)}"
            f" in iteration {last.place}.",
            x_axis(x, _SCORES[1], "iteration", top=_RETURNS[0]),
            _draw_returns(found.points, x),
            _draw_scores(found, x),
        ),
        columns=["iteration", "25 %", "median", "75 %", "score", "evaluation return", "evaluation score"],
        rows=[_cells(point) for point in found.points],
        caption=_caption(found),
    )


def _cells(point: ImprovementPoint) -> list[str]:
    returns = (point.quarter, point.median, point.three_quarters)
    return [
        str(point.place),
        *(notation.gain(value, 2) for value in returns),
        notation.points(point.score),
        notation.gain(point.evaluation_return, 2),
        notation.points(point.evaluation_score),
    ]


def _caption(found: Improvement) -> str:
    others = ", ".join(f"{name} {notation.points(score)}" for name, score in found.references.items())
    return (
        "Above: return of an iteration's episodes, median and middle half; below: their mean score."
        " Dots: argmax episodes on selection rng seeds."
        + (f" For comparison, scores of {others}." if others else "")
    )


def _line(points: Sequence[ImprovementPoint], name: str, x: Scale, y: Scale) -> list[Point | None]:
    values = [(point.place.last, getattr(point, name)) for point in points]
    return [None if value is None else (x(place), y(value)) for place, value in values]


def _draw_returns(points: Sequence[ImprovementPoint], x: Scale) -> Markup:
    paid = [point for point in points if point.median is not None]
    values = [
        value
        for point in points
        for value in (point.quarter, point.median, point.three_quarters, point.evaluation_return)
        if value is not None
    ]
    if not values:
        return Markup("")
    y = Scale(*around([0.0, *values], 4), _RETURNS[1], _RETURNS[0])
    places = [x(point.place.last) for point in paid]
    middle = svg.fan(
        places,
        [y(point.three_quarters or 0.0) for point in paid],
        [y(point.quarter or 0.0) for point in paid],
    )
    evaluated = [at for at in _line(points, "evaluation_return", x, y) if at is not None]
    labels = [
        Label(text, y(point.median or 0.0), "strong halo")
        for point in paid[-1:]
        for text in ("median return", notation.gain(point.median, 2))
    ]
    return svg.group(
        [
            y_axis(y, _LEFT, _RIGHT),
            svg.line(_LEFT, y(0), _RIGHT, y(0), "axis"),
            svg.path(middle, "fan inner"),
            svg.curve(_line(points, "median", x, y), "line"),
            svg.path(svg.dots(evaluated), "dot small"),
            beside_lines(max(places, default=_LEFT) + 8, labels),
        ]
    )


def _draw_scores(found: Improvement, x: Scale) -> Markup:
    points, references = found.points, found.references
    values = [value for p in points for value in (p.score, p.evaluation_score) if value is not None]
    if not values:
        return Markup("")
    low, high = around([*values, *references.values()], 4, floor=0.0)
    y = Scale(low, min(high, 100.0), _SCORES[1], _SCORES[0])
    evaluated = [at for at in _line(points, "evaluation_score", x, y) if at is not None]
    labels = [
        Label(f"{name} {notation.points(score)}", y(score), "ghost halo")
        for name, score in references.items()
    ]
    last_score = next((point.score for point in reversed(points) if point.score is not None), None)
    if last_score is not None:
        labels.append(Label(f"score {notation.points(last_score)}", y(last_score), "strong halo"))
    last_evaluated = next(
        (p.evaluation_score for p in reversed(points) if p.evaluation_score is not None), None
    )
    if last_evaluated is not None:
        labels.append(Label(f"argmax {notation.points(last_evaluated)}", y(last_evaluated), "halo"))
    return svg.group(
        [
            y_axis(y, _LEFT, _RIGHT),
            *(svg.line(_LEFT, y(score), _RIGHT, y(score), "guide") for score in references.values()),
            svg.curve(_line(points, "score", x, y), "line"),
            svg.path(svg.dots(evaluated), "dot small"),
            beside_lines(_RIGHT + 8, labels),
        ]
    )
