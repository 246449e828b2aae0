"""Charts over epochs or iterations, drawn from a specification.

A chart has one or more panels over a common horizontal axis. A panel of a chart shows lines, bands between
two lines, and stacked columns; negative parts of a column are stacked below 0.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from markupsafe import Markup

from esper.karn.drawing import svg
from esper.karn.drawing.axes import LEFT, TOP, AxisScale, apart, around, line_names, x_axis, y_axis
from esper.karn.drawing.picture import Picture
from esper.karn.drawing.svg import number
from esper.karn.questions.series import AxisBin, Series, Values

Segment = tuple[float, float]
"""(start, end) of one part of a stacked column, as values on the vertical axis."""
_GAP: Final = 30.0
"""Vertical gap between the panels of a chart."""
_BOTTOM: Final = 28.0
_FIRST: Final = 4.0
"""Y coordinate of the top of the first strip (row of a chart with its own name and value)."""
_LETTERS: Final = 18
"""Largest number of characters in the displayed name of a strip (row of a chart)."""


class ChartData(NamedTuple):
    """Line of a chart, or one component of all its stacked columns, with one value per bin of the horizontal
    axis.
    """

    name: str
    values: Values
    """Value in each bin; a value of None is a gap."""
    text: Callable[[float | None], str]
    """Function that formats a value as text."""
    look: str = "line"
    """Appearance of a line: ``line``, ``thin``, ``twin`` (dotted), ``steps`` or ``dots``; CSS class of a part
    of stacked columns.
    """
    label: str | None = None
    """Text at the end of a line; None shows name and last value, an empty text shows nothing."""
    total: float | None = None
    """Number in the label of a part of stacked columns; None shows the part's value in the last column."""
    striped: Values | None = None
    """Amount of a part that is drawn striped in each stacked column, starting at the base of the part."""


class Panel(NamedTuple):
    """Panel of a chart: lines, bands and stacked columns on one vertical axis."""

    height: float
    lines: Sequence[ChartData] = ()
    bands: Sequence[tuple[Values, Values]] = ()
    """Bands of the chart as pairs of a lower and an upper edge, the widest band first."""
    parts: Sequence[ChartData] = ()
    near: float | None = None
    """Value that the vertical axis includes if the data comes close to it, such as 0."""
    zero: bool = False
    """Whether the vertical axis includes 0 and marks 0 by a line."""
    most: float | None = None
    """Largest possible value of the data, beyond which the vertical axis does not extend."""
    optional: bool = False
    """Whether the panel of the chart is left out if all its values are 0."""
    ticks: int = 4
    unit: str = ""
    unit_size: float = 1.0
    """Unit of the vertical axis: tick labels are data values divided by this number."""

    def reached(self) -> Iterator[float]:
        """Yield all data values that the vertical axis of the panel must include."""
        yield from (value for line in self.lines for value in line.values if value is not None)
        yield from (value for band in self.bands for edge in band for value in edge if value is not None)
        for values in zip(*(part.values for part in self.parts), strict=True):
            yield from (end for segment in stack(values) for end in segment)


class Chart(NamedTuple):
    """Specification of a chart that shows the data series ``found``."""

    title: str
    description: str
    found: Series
    panels: Sequence[Panel]
    table: tuple[list[str], list[list[str]]]
    """Table (columns and rows) of the numbers that the chart shows."""
    caption: str
    room: float = 150.0
    """Width of the space for labels on the right of the chart."""


def draw(chart_of: Callable[[Series], Chart], found: Series, compared: Series | None) -> Picture:
    """Draw a chart from the series of a run.

    Args:
        chart_of: Function from series of numbers to the specification of the chart.
        found: Series of numbers to draw.
        compared: Series of a second run, whose values the axes must include; None for no second run.
    """
    chart, other = chart_of(found), chart_of(compared) if compared else None
    x = AxisScale(0, max(found.end, compared.end if compared else 0), LEFT, svg.WIDTH - chart.room)
    top, drawn, bottom = TOP, [], TOP
    for index, panel in enumerate(chart.panels):
        values = [*panel.reached(), *(other.panels[index].reached() if other else ())]
        if panel.optional and not any(values):
            continue
        top += 10 if panel.unit else 0
        bottom = top + panel.height
        if values:
            drawn.append(draw_panel(found.bins, panel, x, panel_scale(panel, values, top, bottom)))
        top = bottom + _GAP
    axis, hits = x_axis(x, bottom, found.axis, top=TOP), svg.group(*_hover(chart, x, bottom), class_="hits")
    drawing = svg.drawing(bottom + _BOTTOM, chart.title, chart.description, axis, *drawn, hits)
    return Picture(drawing, *chart.table, chart.caption)


def panel_scale(panel: Panel, values: Sequence[float], top: float, bottom: float) -> AxisScale:
    """Return the vertical scale of a panel of a chart, which includes ``values``."""
    low, high = around([*values, *([0.0] if panel.zero else [])], panel.ticks, floor=panel.near)
    return AxisScale(low, high if panel.most is None else min(high, panel.most), bottom, top)


def draw_panel(bins: Sequence[AxisBin], panel: Panel, x: AxisScale, y: AxisScale) -> Markup:
    """Draw the axis, data and labels of one panel of a chart."""
    at = [x(bin_.last) for bin_ in bins]
    return svg.group(
        y_axis(y, x.start, x.stop, most=panel.ticks + 1, unit_size=panel.unit_size),
        svg.text(x.start - 6, y.stop - 10, panel.unit, "dim", "end") if panel.unit else "",
        *_draw_parts(bins, panel.parts, x, y),
        svg.line(x.start, y(0), x.stop, y(0), "axis") if panel.zero else "",
        *(_draw_band(at, band, y, index) for index, band in enumerate(panel.bands)),
        *(_draw_line(line, bins, x, y, is_column=bool(panel.parts)) for line in panel.lines),
        line_names([] if panel.parts else _line_ends(panel, min(at[-1], x.stop) + 8, y)),
        svg.group(*_part_names(panel, x.stop + 10, y)),
    )


def _draw_line(
    line: ChartData, bins: Sequence[AxisBin], x: AxisScale, y: AxisScale, *, is_column: bool
) -> Markup:
    ends = [sum(edges(bin_, x)) / 2 if is_column else x(bin_.last) for bin_ in bins]
    points = [
        None if value is None else (end, y(value)) for end, value in zip(ends, line.values, strict=True)
    ]
    if line.look == "steps":
        known = [point for point in points if point is not None]
        return svg.path(svg.steps(x(bins[0].first - 1), known), "line")
    return svg.curve(points, line.look)


def _draw_band(at: Sequence[float], band: tuple[Values, Values], y: AxisScale, index: int) -> Markup:
    known = [
        (bin_, y(high), y(low))
        for bin_, low, high in zip(at, *band, strict=True)
        if low is not None and high is not None
    ]
    if not known:
        return Markup("")
    ends, upper, lower = zip(*known, strict=True)
    return svg.path(svg.fan(ends, upper, lower), "fan inner" if index else "fan")


def _draw_parts(
    bins: Sequence[AxisBin], parts: Sequence[ChartData], x: AxisScale, y: AxisScale
) -> Iterator[Markup]:
    stacks = [stack(values) for values in zip(*(part.values for part in parts), strict=True)]
    for index, part in enumerate(parts):
        columns = zip(bins, stacks, strict=True)
        yield svg.path("".join(column(bin_, of[index], x, y) for bin_, of in columns), part.look)
        if part.striped:
            feet = [of[index][0] for of in stacks]
            stripes = "".join(
                f"M{number(sum(edges(bin_, x)) / 2)} {number(y(foot))}V{number(y(foot + size))}"
                for bin_, foot, size in zip(bins, feet, part.striped, strict=True)
                if size
            )
            width = min(edges(bin_, x)[1] - edges(bin_, x)[0] for bin_ in bins)
            yield svg.path(stripes, "hatch", stroke_width=width)


def _line_ends(panel: Panel, x: float, y: AxisScale) -> list[tuple[float, float, str, str]]:
    """Return the right end, the name and the look of each line that has a name."""
    known = [[value for value in line.values if value is not None] for line in panel.lines]
    return [
        (x, y(own[-1]), line.label or f"{line.name} {line.text(own[-1])}", line.look)
        for line, own in zip(panel.lines, known, strict=True)
        if own and line.label != ""
    ]


def _part_names(panel: Panel, x: float, y: AxisScale) -> Iterator[Markup]:
    """Draw the name of each part of stacked columns, with a colour sample. If there is room, all names stay
    between the ends of the vertical axis.
    """
    segments = stack([part.values[-1] for part in panel.parts])
    shown = [pair for pair in zip(panel.parts, segments, strict=True) if pair[0].total != 0]
    heights = apart([y(sum(segment) / 2) for _, segment in shown])
    shift = min(y.start - 5 - max(heights, default=0.0), 0.0)
    shift = max(y.stop + 5 - min(heights, default=0.0), shift)
    for (part, _), height in zip(shown, heights, strict=True):
        value = part.values[-1] if part.total is None else part.total
        yield svg.rectangle(x, height + shift - 5, 10, 10, part.look)
        yield svg.text(x + 15, height + shift + 4, f"{svg.shorten(part.name, 12)} {part.text(value)}")


def _hover(chart: Chart, x: AxisScale, bottom: float) -> Iterator[Markup]:
    """Yield an invisible rectangle per axis bin, whose tooltip shows the values of all lines and stacked
    parts.
    """
    named = [one for panel in chart.panels for one in (*panel.lines, *panel.parts)]
    # In a line chart, the value of an axis bin is drawn at the right end of the bin; a stacked column fills
    # the bin.
    is_line = chart.panels[0].lines and not chart.panels[0].parts
    for index, bin_ in enumerate(chart.found.bins):
        values = ", ".join(f"{one.name} {one.text(one.values[index])}" for one in named)
        left, right = x(bin_.first - 1), x(bin_.last)
        if is_line:
            half = (right - left) / 2
            left, right = left + half, min(right + half, svg.WIDTH)
        title = svg.element("title", f"{chart.found.axis} {bin_}: {values}")
        yield svg.rectangle(left, TOP, right - left, bottom - TOP, None, title)


# --- stacked columns --------------------------------------------------------------------------------


def stack(values: Sequence[float | None]) -> list[Segment]:
    """Return (start, end) of each part of a stacked column; a part with an unknown value has no height."""
    above = below = 0.0
    found = []
    for value in values:
        part = value or 0.0
        if part >= 0:
            found.append((above, above + part))
            above += part
        else:
            found.append((below, below + part))
            below += part
    return found


def edges(bin_: AxisBin, x: AxisScale) -> tuple[float, float]:
    """Return the left and right edge of a stacked column, with a gap to the next column if the column is wide
    enough.
    """
    left, right = x(bin_.first - 1), x(bin_.last)
    gap = 1.0 if right - left > 6 else 0.0
    return left + gap, right - gap


def column(bin_: AxisBin, segment: Segment, x: AxisScale, y: AxisScale) -> str:
    """Return the SVG path of one part of a stacked column; empty if the part is too small to be visible."""
    left, right = edges(bin_, x)
    bottom, top = y(segment[0]), y(segment[1])
    if abs(bottom - top) < 0.05:
        return ""
    return f"M{number(left)} {number(bottom)}V{number(top)}H{number(right)}V{number(bottom)}z"


# --- strips: name on the left, data over the axis, value on the right -------------------------------


class Strip(NamedTuple):
    """Strip: one row of a chart, with a name on the left, content over the axis, and a value on the right."""

    name: str
    draw: Callable[[AxisScale, float], Iterable[Markup]]
    """Function that draws the content of a strip (row of a chart), given the horizontal scale and the top of
    the strip.
    """
    value: str
    is_strong: bool
    """Whether the value of the strip (row of a chart) is emphasised."""
    title: str = ""
    """Tooltip of the strip (row of a chart); empty for none."""


class Strips(NamedTuple):
    """Layout of a chart that consists of strips (rows with a name and a value)."""

    left: float
    """Width of the space for the names, left of the strips (rows of a chart)."""
    right: float
    """Width of the space for the values, right of the strips (rows of a chart)."""
    height: float
    gap: float = 0.0

    def draw(
        self, title: str, description: str, axis: str, end: int, rows: Sequence[Strip], *, grid: bool = True
    ) -> Markup:
        """Draw strips (rows with a name and a value) as one chart with a common horizontal axis.

        Args:
            title: Title of the chart.
            description: Description of the chart for screen readers.
            axis: Name of the horizontal axis.
            end: Largest value of the horizontal axis, which starts at 0.
            rows: Strips (rows of the chart) from top to bottom.
            grid: Whether vertical grid lines are drawn.
        """
        x = AxisScale(0, end, self.left, svg.WIDTH - self.right)
        step = self.height + self.gap
        bottom = _FIRST + step * len(rows)
        return svg.drawing(
            bottom + 26,
            title,
            description,
            x_axis(x, bottom, axis, top=0 if grid else None),
            *(self._draw_row(row, x, _FIRST + step * index) for index, row in enumerate(rows)),
        )

    def _draw_row(self, row: Strip, x: AxisScale, top: float) -> Markup:
        baseline = top + self.height / 2 + 5
        return svg.group(
            svg.element("title", row.title) if row.title else "",
            svg.text(x.start - 8, baseline, svg.shorten(row.name, _LETTERS), "", "end"),
            *row.draw(x, top),
            svg.text(x.stop + 8, baseline, row.value, "strong" if row.is_strong else "dim"),
        )
