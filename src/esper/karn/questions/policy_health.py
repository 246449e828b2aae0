"""PPO diagnostics: metrics of the updates with their recommended bands, and the entropy of each policy head.

A PPO metric is drawn as a strip (row of the chart), in which values outside the recommended band are marked.
A policy head is drawn as a strip that is darker for higher entropy.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from markupsafe import Markup

from esper.karn import notation
from esper.karn.drawing import svg
from esper.karn.drawing.axes import AxisScale
from esper.karn.drawing.chart import Strip, Strips, edges
from esper.karn.drawing.picture import Picture, series_table, shade_look
from esper.karn.drawing.svg import number
from esper.karn.questions.series import Series, Values, query_series
from esper.karn.run import Run
from esper.leyline.columns import COLUMNS, ColumnSpec
from esper.leyline.thresholds import KL_HIGH

UNBANDED: Final = ("entropy", "value_loss")
"""PPO metrics that are shown although they have no recommended band."""
_METRIC_STRIPS: Final = Strips(left=184, right=142, height=28, gap=10)


class Health(NamedTuple):
    """PPO metrics over the iterations of a training, with their column specifications."""

    series: Series
    """PPO metrics by axis bin. A bin of several iterations has the maximum of a metric with an upper limit,
    the minimum of a metric with only a lower limit, and the mean of any other metric.
    """
    metrics: tuple[ColumnSpec, ...]


def health(run: Run) -> Health | None:
    """Return the PPO metrics of a training; None before the first update."""
    metrics = tuple(_with_own_limit(run, column) for column in COLUMNS["update"] if _is_shown(column))
    found = query_series(run, "update", {one.name: _worst(one) for one in metrics}, position="iteration")
    return None if found is None else Health(found, metrics)


def beyond(value: float | None, low: float | None, high: float | None) -> str:
    """Return the limit that a value violates as text, such as "> 0.05"; empty if the value is within the band
    or unknown.
    """
    if value is not None and low is not None and value < low:
        return f"< {low:g}"
    return f"> {high:g}" if value is not None and high is not None and value > high else ""


def _with_own_limit(run: Run, column: ColumnSpec) -> ColumnSpec:
    """Return the column specification of a PPO metric. The upper limit of the KL divergence is derived from
    the run's ``target_kl``, as in the alert rule ``kl``.
    """
    if column.name != "approx_kl":
        return column
    target = run.row.config.get("target_kl")
    return replace(column, high=None if target is None else KL_HIGH * float(target))


def _is_shown(column: ColumnSpec) -> bool:
    is_scalar = column.sql_type in ("DOUBLE", "BIGINT")
    return is_scalar and (column.low is not None or column.high is not None or column.name in UNBANDED)


def _worst(column: ColumnSpec) -> str:
    function = "max" if column.high is not None else "min" if column.low is not None else "avg"
    return f"{function}({column.name})::DOUBLE"


def draw_health(found: Health, compared: Health | None = None) -> Picture:
    """Draw one strip (row of the chart) per PPO metric, on axes that include a second run if given."""
    strips = [_strip(metric, found.series, compared) for metric in found.metrics]
    outside = ", ".join(strip.name for strip in strips if strip.is_strong)
    return Picture(
        _METRIC_STRIPS.draw(
            "Metrics of the updates",
            f"Outside their bands in iteration {found.series.bins[-1]}: {outside or 'none'}.",
            "iteration",
            max(one.series.end for one in (found, compared) if one is not None),
            strips,
        ),
        *series_table(found.series, notation.significant),
        "Shaded: the healthy band. A value outside is marked and followed by its limit.",
    )


def _strip(metric: ColumnSpec, found: Series, compared: Health | None) -> Strip:
    last = found.last(metric.name)
    limit = beyond(last, metric.low, metric.high)
    held = [*found[metric.name], *(compared.series.values.get(metric.name, ()) if compared else ())]
    return Strip(
        metric.name.replace("_", " "),
        partial(_draw_metric, metric, found, held),
        f"{notation.significant(last)} {limit}".strip(),
        bool(limit),
        f"{metric.meaning} Unit: {metric.unit}.",
    )


def _draw_metric(
    metric: ColumnSpec, found: Series, held: Values, x: AxisScale, top: float
) -> Iterator[Markup]:
    """Draw the line of a PPO metric; the vertical axis includes ``held``, the metric's values in all compared
    runs.
    """
    y = AxisScale(*_range(metric, held), top + _METRIC_STRIPS.height, top)
    if metric.low is not None or metric.high is not None:
        ceiling = top - 2 if metric.high is None else y(metric.high)
        floor = top + _METRIC_STRIPS.height + 2 if metric.low is None else y(metric.low)
        yield svg.rectangle(x.start, ceiling, x.stop - x.start, max(floor - ceiling, 1.0), "inband")
    values = found[metric.name]
    at = [None if v is None else (x(p.last), y(v)) for p, v in zip(found.bins, values, strict=True)]
    marked = [
        point
        for point, value in zip(at, values, strict=True)
        if point is not None and beyond(value, metric.low, metric.high)
    ]
    yield svg.curve(at, "thin")
    yield svg.path(svg.dots(marked), "dot small warning-line")


def _range(metric: ColumnSpec, held: Values) -> tuple[float, float]:
    """Return an axis range that includes all values of a PPO metric and a visible part of its recommended
    band.
    """
    limits = [limit for limit in (metric.low, metric.high) if limit is not None]
    values = [*(value for value in held if value is not None), *limits] or [0.0]
    room = 0.3 * (max(values) - min(values)) or abs(values[0]) or 1.0
    values += [metric.low + room] if metric.low is not None else []
    values += [metric.high - room] if metric.high is not None else []
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - room, high + room)


LOW_ENTROPY: Final = next(column.low for column in COLUMNS["update"] if column.name == "head_entropy") or 0.0
"""Normalised entropy below which a policy head is considered collapsed."""
_HEAD_STRIPS: Final = Strips(left=132, right=100, height=20, gap=8)
_entropy = partial(notation.points, decimals=2)


def heads(run: Run) -> Series | None:
    """Return the normalised entropy of each policy head: 1 is uniform over legal choices, None means that the
    head had no choice.
    """
    columns = {name: f"avg(head_entropy[{index + 1}])" for index, name in enumerate(run.row.heads)}
    return query_series(run, "update", columns, position="iteration")


def draw_heads(found: Series, compared: Series | None = None) -> Picture:
    """Draw one strip (row of the chart) per policy head, on an axis that includes a second run if given."""
    dead = [name for name in found.values if _is_low(found.last(name))]
    strips = [
        Strip(name, partial(_draw_head, found, name), _entropy(found.last(name)), _is_low(found.last(name)))
        for name in found.values
    ]
    return Picture(
        _HEAD_STRIPS.draw(
            "Entropy of the heads",
            f"Below their limit in iteration {found.bins[-1]}: {', '.join(dead) or 'none'}.",
            "iteration",
            max(one.end for one in (found, compared) if one is not None),
            strips,
            grid=False,
        ),
        *series_table(found, _entropy),
        "Entropy over what was legal: 1 (dark) uniform, 0 (light) certain."
        f" Marked: below {LOW_ENTROPY:g}, as good as decided. Striped: the head never had a choice.",
    )


def _is_low(value: float | None) -> bool:
    return value is not None and value < LOW_ENTROPY


def _draw_head(found: Series, name: str, x: AxisScale, top: float) -> Iterator[Markup]:
    cells: dict[str, str] = {}
    unread, height = "", _HEAD_STRIPS.height
    for bin_, value in zip(found.bins, found[name], strict=True):
        left, right = edges(bin_, x)
        if value is None:
            unread += f"M{number(left)} {number(top + height / 2)}H{number(right)}"
        else:
            shade = "warning" if _is_low(value) else shade_look(value)
            box = f"M{number(left)} {number(top)}H{number(right)}v{number(height)}H{number(left)}z"
            cells[shade] = cells.get(shade, "") + box
    yield svg.rectangle(x.start, top, x(found.bins[-1].last) - x.start, height, "track")
    yield from (svg.path(commands, shade) for shade, commands in cells.items())
    yield svg.path(unread, "unread", stroke_width=height)
