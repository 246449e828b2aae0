"""Scales, ticks, axes and labels of charts."""

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from markupsafe import Markup

from esper.karn.drawing import svg

LEFT: Final = 62.0
"""X coordinate of the left end of the horizontal axis in most charts."""
TOP: Final = 14.0
"""Y coordinate of the upper end of the topmost vertical axis in a chart."""
_NAME_LOOKS: Final = {"twin": "dim halo", "thin faint": "dim halo", "line": "strong halo"}
"""CSS classes of the text that names a line of a chart, by the appearance of the line."""
_TINY: Final = 1e-300
"""Axis ranges smaller than ``_TINY`` count as empty, because the step between ticks would underflow to 0."""


class AxisScale(NamedTuple):
    """Linear map from data values to coordinates of a chart."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        part = (value - self.low) / span if span else 0.5
        return self.start + part * (self.stop - self.start)


def ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Return at most ``most`` ticks at round numbers between ``low`` and ``high``; with ``whole``, integers
    only."""
    if high <= low:
        return [low]
    step = _round_step((high - low) / max(most, 1), whole=whole)
    # Axis ticks are multiples of the step within the axis range, with a tolerance for rounding errors.
    while len(found := range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)) > most:
        step = _round_step(step * 1.01, whole=whole)
    return [index * step for index in found]


def _round_step(least: float, *, whole: bool) -> float:
    """Return the smallest number ≥ ``least`` among 1, 2 and 5 times powers of ten."""
    if whole and least <= 1:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= least * (1 - 1e-9))


def around(values: Sequence[float], most: int, floor: float | None = None) -> tuple[float, float]:
    """Return an axis range that contains all values; it also contains ``floor`` if the values come close to
    ``floor``.
    """
    low, high = min(values), max(values)
    if floor is not None and (high <= low or low - floor < 0.8 * (high - floor)):
        low = min(floor, low)
    if high - low < _TINY:
        spread = 1.0 if abs(low) < _TINY else 0.1 * abs(low)
        low, high = low - spread, high + spread
    step = _round_step((high - low) / max(most, 1), whole=False)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def tick_text(value: float, step: float) -> str:
    """Format the number of an axis tick with as many decimals as the distance between ticks needs; "k" stands
    for thousands.
    """
    if step >= 1000 or (abs(value) >= 10_000 and step >= 100):
        thousands = value / 1000
        return "0" if value == 0 else f"{thousands:.{_decimals(step / 1000)}f}k"
    return f"{round(value, 9) + 0.0:.{_decimals(step)}f}"


def _decimals(step: float) -> int:
    return max(-math.floor(math.log10(step) + 1e-9), 0) if step > 0 else 0


def tick_texts(values: Sequence[float]) -> dict[float, str]:
    """Return the labels of evenly spaced axis ticks, by tick value."""
    step = values[1] - values[0] if len(values) > 1 else max(abs(values[0]), 1.0) if values else 1.0
    return {value: tick_text(value, step) for value in values}


def y_axis(scale: AxisScale, left: float, right: float, most: int = 5, unit_size: float = 1.0) -> Markup:
    """Draw horizontal grid lines of a chart, with their values divided by ``unit_size`` on the left."""
    values = ticks(scale.low, scale.high, most)
    labels = tick_texts([value / unit_size for value in values]).values()
    heights = [scale(value) for value in values]
    lines = "".join(f"M{svg.number(left)} {svg.number(height)}H{svg.number(right)}" for height in heights)
    pairs = zip(labels, heights, strict=True)
    numbers = [svg.text(left - 6, height + 4, label, "dim", "end") for label, height in pairs]
    return svg.group(svg.path(lines, "grid"), *numbers)


def x_axis(scale: AxisScale, y: float, name: str, top: float | None = None) -> Markup:
    """Draw the bottom axis of a chart with integer ticks, and the name of the axis at its end.

    Args:
        scale: Map from data values to x coordinates.
        y: Vertical coordinate of the axis.
        name: Name of the axis, such as "epoch".
        top: Upper end of vertical grid lines; None draws no grid.
    """
    values = ticks(scale.low, scale.high, 8, whole=True)
    marks = "".join(f"M{svg.number(scale(value))} {svg.number(y)}v4" for value in values)
    foot = f" {svg.number(y)}V"
    rise = "".join(f"M{svg.number(scale(at))}{foot}{svg.number(top)}" for at in values if top is not None)
    numbers = [
        svg.text(scale(value), y + svg.LINE + 2, label, "dim", "middle")
        for value, label in tick_texts(values).items()
    ]
    return svg.group(
        svg.path(rise, "grid"),
        svg.path(f"M{svg.number(scale.start)} {svg.number(y)}H{svg.number(scale.stop)}{marks}", "axis"),
        *numbers,
        svg.text(svg.WIDTH, y + svg.LINE + 2, name, "dim", "end"),
    )


def value_axis(scale: AxisScale, y: float, name: str, labels: Mapping[float, str]) -> Markup:
    """Draw the bottom axis of a chart with the given tick labels, and the name of the axis below its end."""
    return svg.group(
        svg.line(scale.start, y, scale.stop, y, "axis"),
        *(svg.text(scale(at), y + svg.LINE + 2, text, "dim", "middle") for at, text in labels.items()),
        svg.text(scale.stop, y + 2 * svg.LINE + 4, name, "dim", "end"),
    )


def line_names(ends: Sequence[tuple[float, float, str, str]]) -> Markup:
    """Draw the names of lines at their ends, without overlaps; an end is (x, y, name, look of the line)."""
    heights = apart([y for _, y, _, _ in ends])
    return svg.group(
        *(
            svg.text(x, height + 4, name, _NAME_LOOKS.get(look, "halo"))
            for (x, _, name, look), height in zip(ends, heights, strict=True)
        )
    )


def apart(heights: Sequence[float], gap: float = svg.LINE) -> list[float]:
    """Return vertical positions of labels as close to ``heights`` as possible, with at least ``gap`` between
    two labels.

    Labels that would overlap are stacked as one block around the mean of their preferred heights.
    """
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    blocks: list[tuple[float, int]] = []
    """Blocks of stacked labels, each as (preferred height of its first label, number of its labels)."""
    for index in order:
        start, count = heights[index], 1
        while blocks and blocks[-1][0] + gap * blocks[-1][1] > start:
            above, others = blocks.pop()
            start = (above * others + (start - gap * others) * count) / (others + count)
            count += others
        blocks.append((start, count))
    placed = [start + gap * step for start, count in blocks for step in range(count)]
    found = dict(zip(order, placed, strict=True))
    return [found[index] for index in range(len(heights))]
