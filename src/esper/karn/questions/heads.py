"""Is a head dead: the normalised entropy of every head in every iteration, where it had a choice.

The picture: a strip per head over the iterations, the darker the more open its choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from esper.karn import notation
from esper.karn.drawing import svg
from esper.karn.drawing.axes import Scale, x_axis
from esper.karn.drawing.picture import Picture
from esper.karn.drawing.stacks import edges
from esper.karn.drawing.style import shade_look
from esper.karn.drawing.svg import Markup, number
from esper.karn.questions.episodes import EpisodeKey
from esper.karn.questions.places import Place, axis_of
from esper.karn.run import Run
from esper.leyline.columns import COLUMNS

_LEFT: Final = 132.0
_RIGHT: Final = svg.WIDTH - 100
_ROW: Final = 28.0
_STRIP: Final = 20.0


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads over iterations."""

    iterations: int
    places: tuple[Place, ...]
    names: tuple[str, ...]
    entropy: tuple[tuple[float | None, ...], ...]
    """Per head and place: 1 uniform over what was legal, 0 certain; None: it never had a choice."""
    low: float | None
    """Below this a head is as good as dead."""


def heads(run: Run, episode: EpisodeKey | None = None) -> Heads | None:
    """Of a whole training, whichever episode is shown; None: there was no update yet."""
    axis = axis_of(run, None)
    names = run.row.heads
    means = ", ".join(f"avg(head_entropy[{index + 1}])" for index in range(len(names)))
    found = run.sql(
        f"SELECT min(iteration), max(iteration), {means} FROM update"
        f" GROUP BY {axis.group('iteration')} ORDER BY 1"
    ).fetchall()
    if not found:
        return None
    places = tuple(Place(first, last) for first, last, *_ in found)
    (column,) = (column for column in COLUMNS["update"] if column.name == "head_entropy")
    return Heads(
        iterations=max(axis.end, places[-1].last),
        places=places,
        names=tuple(names),
        entropy=tuple(tuple(row[index + 2] for row in found) for index in range(len(names))),
        low=column.low,
    )


def draw_heads(found: Heads, beside: Heads | None = None) -> Picture:
    """One strip per head, on an axis that holds what is beside it too."""
    x = Scale(0, max(one.iterations for one in (found, beside) if one is not None), _LEFT, _RIGHT)
    bottom = _ROW * len(found.names) + 4
    dead = [
        name for name, values in zip(found.names, found.entropy, strict=True) if _is_low(values[-1], found)
    ]
    return Picture(
        svg=svg.drawing(
            bottom + 26,
            "Entropy of the heads",
            f"Below their limit in iteration {found.places[-1]}: {', '.join(dead) or 'none'}.",
            x_axis(x, bottom, "iteration"),
            *(_draw_head(found, index, x) for index in range(len(found.names))),
        ),
        columns=["iteration", *found.names],
        rows=[
            [str(place), *(notation.points(values[index], 2) for values in found.entropy)]
            for index, place in enumerate(found.places)
        ],
        caption=_caption(found),
    )


def _caption(found: Heads) -> str:
    limit = "" if found.low is None else f" Marked: below {found.low:g}, as good as decided."
    return (
        "Entropy over what was legal: 1 (dark) uniform, 0 (light) certain."
        f"{limit} Striped: the head never had a choice."
    )


def _is_low(value: float | None, found: Heads) -> bool:
    return value is not None and found.low is not None and value < found.low


def _draw_head(found: Heads, index: int, x: Scale) -> Markup:
    top = 4 + _ROW * index
    cells: dict[str, str] = {}
    unread = ""
    for place, value in zip(found.places, found.entropy[index], strict=True):
        left, right = edges(place, x)
        if value is None:
            unread += f"M{number(left)} {number(top + _STRIP / 2)}H{number(right)}"
        else:
            shade = "warning" if _is_low(value, found) else shade_look(value)
            box = f"M{number(left)} {number(top)}H{number(right)}v{number(_STRIP)}H{number(left)}z"
            cells[shade] = cells.get(shade, "") + box
    last = found.entropy[index][-1]
    look = "strong" if _is_low(last, found) else "dim"
    return svg.group(
        [
            svg.text(_LEFT - 8, top + 15, found.names[index], "", "end"),
            svg.rectangle(_LEFT, top, x(found.places[-1].last) - _LEFT, _STRIP, "track"),
            *(svg.path(commands, shade) for shade, commands in cells.items()),
            svg.path(unread, "unread", stroke_width=_STRIP),
            svg.text(_RIGHT + 8, top + 15, notation.points(last, 2), look),
        ]
    )
