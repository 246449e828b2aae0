"""Charts of curves and dots over a logarithmic axis, with the names of the curves on the right."""

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from markupsafe import Markup

from esper.karn.drawing import svg
from esper.karn.drawing.axes import LEFT, TOP, AxisScale, around, line_names, value_axis, y_axis

FOOT: Final = 46.0
"""Height of the space below a panel of a chart for the tick labels and the name of the axis."""
_ROOM: Final = 170.0
"""Width of the space for the names of curves on the right of a chart."""
_HEIGHT: Final = 300.0
_LETTERS: Final = 20
_TICKS: Final = 5


class Curve(NamedTuple):
    """Curve or dots in a chart, with a name; a point with a coordinate of NaN is unknown and not drawn."""

    name: str
    points: Sequence[tuple[float, float]]
    look: str
    """Appearance of the curve: ``line``, ``thin``, ``thin faint``, ``twin`` (dotted) or ``dots``."""

    @property
    def known(self) -> list[svg.Point]:
        return [point for point in self.points if not any(map(math.isnan, point))]


def draw_curves(title: str, axis: str, labels: Mapping[float, str], curves: Sequence[Curve]) -> Markup:
    """Draw curves as an SVG chart over a logarithmic axis.

    Args:
        title: Title of the chart.
        axis: Name of the horizontal axis.
        labels: Tick labels of the horizontal axis, by data value.
        curves: Curves to draw; a later curve is drawn over earlier curves.
    """
    losses = [loss for curve in curves for _, loss in curve.known]
    if not losses:
        nothing = svg.text(LEFT, 40, "nothing to show", "dim")
        return svg.drawing(TOP + _HEIGHT, title, "no arm has a known loss", nothing)
    named = sum(bool(curve.name and curve.known) for curve in curves)
    description = f"{named} lines; the lowest loss is {min(losses):.3f}."
    return svg.drawing(TOP + _HEIGHT + FOOT, title, description, curve_panel(axis, labels, curves))


def curve_panel(
    axis: str, labels: Mapping[float, str], curves: Sequence[Curve], top: float = TOP, height: float = _HEIGHT
) -> Markup:
    """Draw curves with their axes and names; at least one point of the curves must be known."""
    known = [point for curve in curves for point in curve.known]
    places = [math.log2(at) for at, _ in known]
    x = AxisScale(min(places), max(places), LEFT, svg.WIDTH - _ROOM)
    y = AxisScale(*around([value for _, value in known], _TICKS), top + height, top)
    drawn, ends = [], []
    for curve in curves:
        points = [None if math.isnan(value) else (x(math.log2(at)), y(value)) for at, value in curve.points]
        seen = [point for point in points if point is not None]
        drawn.append(svg.curve(points, curve.look))
        if curve.name and seen:
            end = seen[-1][0] if curve.look == "dots" else x.stop
            ends.append((end + 9, seen[-1][1], svg.shorten(curve.name, _LETTERS), curve.look))
    return svg.group(
        y_axis(y, x.start, x.stop, most=_TICKS + 1),
        value_axis(x, top + height, axis, _thinned(x, labels)),
        *drawn,
        line_names(ends),
    )


def _thinned(x: AxisScale, labels: Mapping[float, str]) -> dict[float, str]:
    """Return tick labels by position on the axis; a label that would overlap the previous label is
    omitted.
    """
    kept: dict[float, str] = {}
    free = -math.inf
    for value, text in sorted(labels.items()):
        place, half = math.log2(value), svg.width_of(text) / 2
        if x(place) - half >= free:
            kept[place] = text
            free = x(place) + half
    return kept
