"""Is PPO healthy: the metrics of every update that have a healthy band, and the policy's entropy.

The picture: one small line per metric in its band; a value outside is marked, with its limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from esper.karn import notation
from esper.karn.drawing import svg
from esper.karn.drawing.axes import Scale, x_axis
from esper.karn.drawing.picture import Picture
from esper.karn.drawing.svg import Markup
from esper.karn.questions.episodes import EpisodeKey
from esper.karn.questions.places import Place, axis_of
from esper.karn.run import Run
from esper.leyline.columns import COLUMNS, ColumnSpec
from esper.leyline.limits import KL_HIGH

BESIDE: Final = ("entropy", "value_loss")
"""Shown too although they have no band."""
_LEFT: Final = 184.0
_RIGHT: Final = svg.WIDTH - 142
_ROW: Final = 38.0
_LINE: Final = 28.0
"""Height of a line; the rest of its row is the gap."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric over the iterations."""

    name: str
    unit: str
    meaning: str
    low: float | None
    high: float | None
    """Edges of the healthy band; None: open."""
    values: tuple[float | None, ...]
    """Per place; of iterations that were taken together the least healthy, or the mean without a band."""

    def is_outside(self, value: float | None) -> bool:
        """Whether a value has left the band; what is unknown has not."""
        if value is None:
            return False
        return (self.low is not None and value < self.low) or (self.high is not None and value > self.high)


@dataclass(frozen=True, slots=True)
class Health:
    """All metrics over the same iterations."""

    iterations: int
    places: tuple[Place, ...]
    metrics: tuple[Metric, ...]


def health(run: Run, episode: EpisodeKey | None = None) -> Health | None:
    """Of a whole training, whichever episode is shown; None: there was no update yet."""
    axis = axis_of(run, None)
    columns = [column for column in COLUMNS["update"] if _is_shown(column)]
    chosen = ", ".join(_worst(column) for column in columns)
    found = run.sql(
        f"SELECT min(iteration), max(iteration), {chosen} FROM update"
        f" GROUP BY {axis.group('iteration')} ORDER BY 1"
    ).fetchall()
    if not found:
        return None
    places = tuple(Place(first, last) for first, last, *_ in found)
    return Health(
        iterations=max(axis.end, places[-1].last),
        places=places,
        metrics=tuple(
            Metric(
                column.name,
                column.unit,
                column.meaning,
                column.low,
                _upper_edge(run, column),
                tuple(None if row[index] is None else float(row[index]) for row in found),
            )
            for index, column in enumerate(columns, start=2)
        ),
    )


def _upper_edge(run: Run, column: ColumnSpec) -> float | None:
    """Of the healthy band; that of the divergence follows the run's own target, as the alert does."""
    if column.name != "approx_kl":
        return column.high
    target = run.row.config.get("target_kl")
    return None if target is None else KL_HIGH * float(target)


def _is_shown(column: ColumnSpec) -> bool:
    is_scalar = column.sql_type in ("DOUBLE", "BIGINT")
    return is_scalar and (column.low is not None or column.high is not None or column.name in BESIDE)


def _worst(column: ColumnSpec) -> str:
    function = "max" if column.high is not None else "min" if column.low is not None else "avg"
    return f"{function}({column.name})"


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
