"""Stacked columns: at every place on the axis, parts on top of each other; what is negative hangs below 0."""

from __future__ import annotations

from collections.abc import Sequence

from esper.karn.drawing.axes import Scale
from esper.karn.drawing.svg import number
from esper.karn.questions.places import Place

Segment = tuple[float, float]
"""From one value to another."""


def stack(values: Sequence[float | None]) -> list[Segment]:
    """Where each part begins and ends, counted from 0; what is unknown takes no room."""
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


def edges(place: Place, x: Scale) -> tuple[float, float]:
    """Left and right of a column, with a gap where there is room for one."""
    left, right = x(place.first - 1), x(place.last)
    gap = 1.0 if right - left > 6 else 0.0
    return left + gap, right - gap


def column(place: Place, segment: Segment, x: Scale, y: Scale) -> str:
    """The commands of one part of a column; nothing if it is too small to be seen."""
    left, right = edges(place, x)
    bottom, top = y(segment[0]), y(segment[1])
    if abs(bottom - top) < 0.05:
        return ""
    return f"M{number(left)} {number(bottom)}V{number(top)}H{number(right)}V{number(bottom)}z"
