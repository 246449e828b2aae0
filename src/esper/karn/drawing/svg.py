"""SVG elements as text, with escaped content and short coordinates."""

import re
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from typing import Final

from markupsafe import Markup

WIDTH: Final = 640.0
"""Width of every chart in SVG units; a page scales the chart to its own width."""
LETTER: Final = 9.6
"""Upper bound of the mean character width in SVG units, at the larger font size of narrow pages."""
LINE: Final = 17.0
"""Line height in SVG units, at the larger font size of narrow pages."""

_FORBIDDEN: Final = re.compile("[\x00-\x08\x0b-\x1f\ud800-\udfff\ufffe\uffff]")

Point = tuple[float, float]


def number(value: float) -> str:
    """Format an SVG coordinate with at most one decimal."""
    text = f"{value:.1f}"
    return "0" if text == "-0.0" else text.removesuffix(".0")


def element(tag: str, *children: str, **attributes: str | float | None) -> Markup:
    """Return an SVG element; attributes of None are omitted, ``class_`` becomes ``class``, and ``_`` within a
    name becomes ``-``.
    """
    parts = [tag]
    for name, value in attributes.items():
        if value is not None:
            shown = value if isinstance(value, str) else number(value)
            parts.append(f'{name.rstrip("_").replace("_", "-")}="{_clean(shown, quote=True)}"')
    opening = " ".join(parts)
    if not children:
        return Markup(f"<{opening}/>")
    inside = "".join(child if isinstance(child, Markup) else _clean(child) for child in children)
    return Markup(f"<{opening}>{inside}</{tag}>")


def _clean(text: str, *, quote: bool = False) -> str:
    """Escape text and remove characters that XML forbids."""
    return escape(_FORBIDDEN.sub("", text), quote=quote)


def group(*children: str, **attributes: str | float | None) -> Markup:
    """Return an SVG group of elements; an empty string if there are no elements."""
    inside = "".join(children)
    return element("g", Markup(inside), **attributes) if inside else Markup("")


def drawing(height: float, title: str, description: str, *children: str) -> Markup:
    """Return an SVG drawing ``WIDTH`` units wide, with title and description for screen readers."""
    return element(
        "svg",
        element("title", title),
        element("desc", description),
        *children,
        xmlns="http://www.w3.org/2000/svg",
        class_="esper",
        viewBox=f"0 0 {number(WIDTH)} {number(height)}",
        role="img",
    )


def text(x: float, y: float, content: str, class_: str = "", anchor: str | None = None) -> Markup:
    """Return a line of SVG text; ``y`` is the baseline, ``anchor`` is "middle", "end" or None for start."""
    return element("text", content, x=x, y=y, class_=class_ or None, text_anchor=anchor)


def rectangle(x: float, y: float, width: float, height: float, class_: str | None, *children: str) -> Markup:
    return element("rect", *children, x=x, y=y, width=width, height=height, class_=class_)


def path(commands: str, class_: str, *children: str, **attributes: str | float | None) -> Markup:
    """Return an SVG path; an empty string if there are no path commands."""
    if not commands:
        return Markup("")
    return element("path", *children, d=commands, class_=class_, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return path(f"M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}", class_)


def polyline(points: Iterable[Point]) -> str:
    """Return the SVG path commands of a line through points."""
    return "".join(f"{'L' if index else 'M'}{number(x)} {number(y)}" for index, (x, y) in enumerate(points))


def curve(points: Sequence[Point | None], class_: str) -> Markup:
    """Draw a line with gaps at unknown points, and isolated points as dots. With the class "dots" all points
    are drawn as dots.
    """
    if class_ == "dots":
        return path(dots(point for point in points if point is not None), "dot small")
    parts = [list(part) for is_known, part in groupby(points, lambda point: point is not None) if is_known]
    known = [[point for point in part if point is not None] for part in parts]
    lines = "".join(polyline(part) for part in known if len(part) > 1)
    alone = dots(part[0] for part in known if len(part) == 1)
    return path(lines, class_) + path(alone, "dot small")


def steps(start: float, points: Sequence[Point]) -> str:
    """Return the SVG path commands of a step line; between two points the line has the height of the second
    point.
    """
    commands = f"M{number(start)} {number(points[0][1])}" if points else ""
    return commands + "".join(f"V{number(y)}H{number(x)}" for x, y in points)


def fan(positions: Sequence[float], upper: Sequence[float], lower: Sequence[float]) -> str:
    """Return the SVG path commands of the area between two lines. An area over a single x position is widened
    to be visible.
    """
    if len(positions) == 1:
        positions, upper, lower = [positions[0] - 5, positions[0] + 5], [upper[0]] * 2, [lower[0]] * 2
    outline = [*zip(positions, upper, strict=True), *reversed(list(zip(positions, lower, strict=True)))]
    return polyline(outline) + "z"


def dots(points: Iterable[Point]) -> str:
    """Return the SVG path commands of zero-length lines, drawn as dots by their line caps."""
    return "".join(f"M{number(x)} {number(y)}h0" for x, y in points)


def width_of(content: str) -> float:
    """Return an upper estimate of the width of a text in SVG units."""
    return LETTER * len(content)


def shorten(content: str, letters: int) -> str:
    """Shorten a text to at most ``letters`` characters, with "…" at its end."""
    return content if len(content) <= letters else content[: max(letters - 1, 0)] + "…"
