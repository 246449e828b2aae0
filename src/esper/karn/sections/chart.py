"""A course as a chart of several lines: bars, a shaded span above them, and a ghost line across."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Self

from rich.text import Text

from esper.karn import notation
from esper.karn.notation import BLOCKS
from esper.karn.sections.layout import COURSE_AT, LABEL, VALUE, Section, joined, labelled

SHADE: Final = "░"
GHOST: Final = "─"
LINES: Final = 9
"""Of a chart with its title."""


class Bar(NamedTuple):
    """One column of a chart; None is unknown."""

    solid: float | None
    shaded: float | None = None
    """Where the shade above the bar ends."""
    ghost: float | None = None


class Scale(NamedTuple):
    """Lowest and highest value, and the lines between them."""

    low: float
    high: float
    lines: int

    def eighths(self, value: float) -> int:
        """The height of a value in eighths of a line, at least one so that it can be seen."""
        span = self.high - self.low
        share = (value - self.low) / span if span > 0 else 0.0
        return max(round(share * self.lines * len(BLOCKS)), 1)


def chart(bars: Sequence[Bar], scale: Scale) -> list[Text]:
    """The lines of a chart, top first."""
    heights = [Heights.of(bar, scale) for bar in bars]
    return [joined(_cell(bar, line) for bar in heights) for line in reversed(range(scale.lines))]


class Heights(NamedTuple):
    """A bar in eighths of a line; 0 is nothing."""

    solid: int
    shaded: int
    ghost: int

    @classmethod
    def of(cls, bar: Bar, scale: Scale) -> Self:
        return cls(*(0 if value is None else scale.eighths(value) for value in bar))


def _cell(bar: Heights, line: int) -> tuple[str, str]:
    """What stands in one line of one column, and how it looks."""
    filled = bar.solid - line * len(BLOCKS)
    if bar.ghost and (bar.ghost - 1) // len(BLOCKS) == line:
        return GHOST, "reverse" if filled >= len(BLOCKS) else "dim"
    if filled > 0:
        return BLOCKS[min(filled, len(BLOCKS)) - 1], ""
    return (SHADE, "dim") if bar.shaded > line * len(BLOCKS) else (" ", "")


def charted(bars: Sequence[Bar], title: str) -> Section:
    """A chart with its scale, for high screens."""
    low, high = notation.shared_scale([value for bar in bars for value in bar])

    def draw(room: int) -> list[Text]:
        lines = chart(bars, Scale(low, high, room - 1))
        edges = {0: notation.points(high), len(lines) - 1: notation.points(low)}
        shown = [labelled("", f"{edges.get(n, ''):>{VALUE}}  ", line) for n, line in enumerate(lines)]
        return [*shown, labelled("", " " * (COURSE_AT - LABEL), Text(title, style="dim"))]

    return Section(draw, most=LINES, start=LINES)
