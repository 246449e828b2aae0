"""Rows over one axis: a name on the left, a strip over the places, what it comes to on the right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from esper.karn.drawing import svg
from esper.karn.drawing.axes import Scale, x_axis
from esper.karn.drawing.svg import Markup

_TOP = 4.0


@dataclass(frozen=True, slots=True)
class Strip:
    """One row."""

    name: str
    draw: Callable[[Scale, float], Iterable[Markup]]
    """What lies on it, by the scale of the axis and the height of its upper edge."""
    value: str
    is_strong: bool
    """Whether the value stands out."""
    title: str = ""
    """What is said under the mouse."""


@dataclass(frozen=True, slots=True)
class Strips:
    """How the rows of one picture lie."""

    left: float
    """Room for the names."""
    right: float
    """Room for the values."""
    height: float
    """Of a strip."""
    gap: float = 0.0
    """Between strips."""
    letters: int = 18
    """Of a name, at most."""

    def draw(
        self, title: str, description: str, axis: str, end: int, rows: Sequence[Strip], *, grid: bool = True
    ) -> Markup:
        """The picture; ``end`` is where its axis ends, ``grid`` draws lines up from its ticks."""
        x = Scale(0, end, self.left, svg.WIDTH - self.right)
        step = self.height + self.gap
        bottom = _TOP + step * len(rows)
        return svg.drawing(
            bottom + 26,
            title,
            description,
            x_axis(x, bottom, axis, top=0 if grid else None),
            *(self._draw_row(row, x, _TOP + step * index) for index, row in enumerate(rows)),
        )

    def _draw_row(self, row: Strip, x: Scale, top: float) -> Markup:
        baseline = top + self.height / 2 + 5
        return svg.group(
            [
                svg.element("title", row.title) if row.title else "",
                svg.text(x.start - 8, baseline, svg.shorten(row.name, self.letters), "", "end"),
                *row.draw(x, top),
                svg.text(x.stop + 8, baseline, row.value, "strong" if row.is_strong else "dim"),
            ]
        )
