"""Direct labels: what a line or an area is, written beside it, never on top of another label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from esper.karn.drawing import svg
from esper.karn.drawing.axes import apart
from esper.karn.drawing.svg import Markup


class Label(NamedTuple):
    """A text that belongs to a height."""

    content: str
    height: float
    look: str = ""
    """Class of the text or, beside an area, of the area."""


def beside_lines(x: float, labels: Sequence[Label]) -> Markup:
    """Names of lines at their ends."""
    heights = apart([label.height for label in labels])
    return svg.group(
        svg.text(x, height + 4, label.content, label.look)
        for label, height in zip(labels, heights, strict=True)
    )


def beside_areas(x: float, labels: Sequence[Label], lowest: float, highest: float) -> Markup:
    """Names of areas with a sample of each, within ``highest`` to ``lowest`` where they fit."""
    heights = apart([label.height for label in labels])
    if heights:
        shift = min(lowest - 5 - max(heights), 0.0)
        shift = max(highest + 5 - min(heights), shift)
        heights = [height + shift for height in heights]
    return svg.group(
        svg.rectangle(x, height - 5, 10, 10, label.look) + svg.text(x + 15, height + 4, label.content)
        for label, height in zip(labels, heights, strict=True)
    )
