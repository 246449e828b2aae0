"""Is PPO healthy: one small line per metric in its band; what is outside is bright, with its limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from esper.karn import notation
from esper.karn.figures import svg
from esper.karn.figures.axes import Scale, x_axis
from esper.karn.figures.picture import Picture
from esper.karn.figures.svg import Markup
from esper.karn.questions.episodes import EpisodeKey
from esper.karn.questions.health import Health, Metric, health
from esper.karn.questions.places import Place
from esper.karn.run import Run

_LEFT: Final = 184.0
_RIGHT: Final = svg.WIDTH - 142
_ROW: Final = 38.0
_LINE: Final = 28.0
"""Height of a line; the rest of its row is the gap."""


def health_picture(run: Run, episode: EpisodeKey | None = None) -> Picture | None:
    """The answer of the whole training, whichever episode is looked at."""
    found = health(run)
    return None if found is None else draw_health(found)


def health_beside(run: Run, other: Run) -> Picture | None:
    """The training on axes that hold another one too."""
    found = health(run)
    return None if found is None else draw_health(found, health(other))


def draw_health(found: Health, beside: Health | None = None) -> Picture:
    """One row per metric, all over the same iterations, on axes that hold what is beside it too."""
    x = Scale(0, max(one.iterations for one in (found, beside) if one is not None), _LEFT, _RIGHT)
    values_beside = {metric.name: metric.values for metric in (beside.metrics if beside else ())}
    bottom = _ROW * len(found.metrics) + 4
    outside = [metric for metric in found.metrics if metric.is_outside(metric.values[-1])]
    return Picture(
        svg=svg.drawing(
            bottom + 26,
            "Metrics of the updates",
            f"Outside their bands in iteration {found.places[-1]}:"
            f" {', '.join(_name(metric) for metric in outside) or 'none'}.",
            x_axis(x, bottom, "iteration", top=0),
            *(
                _draw_metric(metric, found.places, x, 4 + _ROW * index, values_beside.get(metric.name, ()))
                for index, metric in enumerate(found.metrics)
            ),
        ),
        columns=["iteration", *(metric.name for metric in found.metrics)],
        rows=[
            [str(place), *(notation.significant(metric.values[index]) for metric in found.metrics)]
            for index, place in enumerate(found.places)
        ],
        caption="Shaded: the healthy band. A value outside is marked, and its limit stands beside it.",
    )


def _name(metric: Metric) -> str:
    return metric.name.replace("_", " ")


def _draw_metric(
    metric: Metric, places: Sequence[Place], x: Scale, top: float, beside: Sequence[float | None]
) -> Markup:
    y = Scale(*_range(metric, beside), top + _LINE, top)
    at = [
        None if v is None else (x(place.last), y(v)) for place, v in zip(places, metric.values, strict=True)
    ]
    marked = [
        point
        for point, value in zip(at, metric.values, strict=True)
        if point is not None and metric.is_outside(value)
    ]
    last = metric.values[-1]
    return svg.group(
        [
            svg.element("title", f"{metric.meaning} Unit: {metric.unit}."),
            svg.text(_LEFT - 8, top + 19, svg.shorten(_name(metric), 18), "dim", "end"),
            *_draw_band(metric, y, top),
            svg.curve(at, "thin"),
            svg.path(svg.dots(marked), "dot small warning-line"),
            svg.text(_RIGHT + 8, top + 19, _value_text(metric, last), _look(metric, last)),
        ]
    )


def _range(metric: Metric, beside: Sequence[float | None]) -> tuple[float, float]:
    """All values, those beside it too, and enough of the band that it can be seen."""
    known = [value for value in (*metric.values, *beside) if value is not None]
    limits = [limit for limit in (metric.low, metric.high) if limit is not None]
    values = [*known, *limits] or [0.0]
    room = 0.3 * (max(values) - min(values)) or abs(values[0]) or 1.0
    inside = [limit + room for limit in (metric.low,) if limit is not None]
    inside += [limit - room for limit in (metric.high,) if limit is not None]
    low, high = min([*values, *inside]), max([*values, *inside])
    return (low, high) if high > low else (low - room, high + room)


def _draw_band(metric: Metric, y: Scale, top: float) -> Iterator[Markup]:
    if metric.low is None and metric.high is None:
        return
    ceiling = top - 2 if metric.high is None else y(metric.high)
    floor = top + _LINE + 2 if metric.low is None else y(metric.low)
    yield svg.rectangle(_LEFT, ceiling, _RIGHT - _LEFT, max(floor - ceiling, 1.0), "inband")


def _look(metric: Metric, value: float | None) -> str:
    return "strong" if metric.is_outside(value) else "dim"


def _value_text(metric: Metric, value: float | None) -> str:
    shown = notation.significant(value)
    if value is not None and metric.high is not None and value > metric.high:
        return f"{shown} > {metric.high:g}"
    if value is not None and metric.low is not None and value < metric.low:
        return f"{shown} < {metric.low:g}"
    return shown
