"""A drawing as a file of its own: it carries its stylesheet, and follows light and dark by itself."""

from __future__ import annotations

from esper.karn.figures.picture import Picture
from esper.karn.figures.style import STYLE
from esper.karn.figures.svg import element


def standalone(picture: Picture) -> str:
    """The text of an SVG file."""
    opening, mark, rest = picture.svg.partition(">")
    return opening + mark + element("style", STYLE) + rest
