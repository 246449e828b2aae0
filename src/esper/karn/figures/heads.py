"""Is a head dead: a strip per head over the iterations, the darker the more open its choice."""

from __future__ import annotations

from typing import Final

from esper.karn import notation
from esper.karn.figures import svg
from esper.karn.figures.axes import Scale, x_axis
from esper.karn.figures.picture import Picture
from esper.karn.figures.stacks import edges
from esper.karn.figures.style import shade_look
from esper.karn.figures.svg import Markup, number
from esper.karn.questions.episodes import EpisodeKey
from esper.karn.questions.heads import Heads, heads
from esper.karn.run import Run

_LEFT: Final = 132.0
_RIGHT: Final = svg.WIDTH - 76
_ROW: Final = 28.0
_STRIP: Final = 20.0


def heads_picture(run: Run, episode: EpisodeKey | None = None) -> Picture | None:
    """The answer of the whole training, whichever episode is looked at."""
    found = heads(run)
    return None if found is None else draw_heads(found)


def heads_beside(run: Run, other: Run) -> Picture | None:
    """The training on an axis that holds another one too."""
    found = heads(run)
    return None if found is None else draw_heads(found, heads(other))


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
