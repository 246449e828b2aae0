"""The marks of a seed's moves as shapes, so that they look alike in every font."""

from __future__ import annotations

from esper.karn.drawing import svg
from esper.karn.drawing.svg import Markup, number
from esper.leyline.stages import Stage


def mark(stage: Stage, x: float, y: float, label: str) -> Markup:
    """Germinated is a ring, fossilized a diamond, pruned a pair of scissors; ``label`` is shown on hover."""
    return svg.group([element_of(stage, x, y), svg.element("title", label)])


def element_of(stage: Stage, x: float, y: float) -> Markup:
    """The shape alone, about ten units wide around its place."""
    if stage is Stage.GERMINATED:
        return svg.element("circle", cx=x, cy=y, r=4, class_="ring germinated")
    if stage is Stage.FOSSILIZED:
        return svg.path(f"M{number(x)} {number(y - 6)}l6 6l-6 6l-6 -6z", "mark fossilized")
    return _scissors(x, y)


def _scissors(x: float, y: float) -> Markup:
    """Two blades that cross, each with its grip below."""
    blades = f"M{number(x - 4)} {number(y - 6)}l5.6 8.6m2.4 -8.6l-5.6 8.6"
    grips = "".join(
        f"M{number(x + side - 1.8)} {number(y + 4.2)}a1.8 1.8 0 1 0 3.6 0a1.8 1.8 0 1 0 -3.6 0"
        for side in (-2.6, 2.6)
    )
    return svg.path(blades + grips, "cut pruned-line")
