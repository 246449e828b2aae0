"""Is a head dead: the normalised entropy of every head in every iteration, where it had a choice.

The picture: a strip per head over the iterations, the darker the more open its choice.
"""

from collections.abc import Iterator
from functools import partial
from typing import Final

from markupsafe import Markup

from esper.karn import notation
from esper.karn.drawing import svg
from esper.karn.drawing.axes import AxisScale
from esper.karn.drawing.chart import Strip, Strips, edges
from esper.karn.drawing.picture import Picture, series_table
from esper.karn.drawing.style import shade_look
from esper.karn.drawing.svg import number
from esper.karn.questions.series import Series, query_series
from esper.karn.run import Run
from esper.leyline.columns import COLUMNS

LOW: Final = next(column.low for column in COLUMNS["update"] if column.name == "head_entropy") or 0.0
"""Below this a head is as good as dead."""
_STRIPS: Final = Strips(left=132, right=100, height=20, gap=8)
_text = partial(notation.points, decimals=2)


def heads(run: Run) -> Series | None:
    """By head: 1 uniform over what was legal, 0 certain, None: it never had a choice. None: no update yet."""
    columns = {name: f"avg(head_entropy[{index + 1}])" for index, name in enumerate(run.row.heads)}
    return query_series(run, "update", columns, place="iteration")


def draw_heads(found: Series, beside: Series | None = None) -> Picture:
    """One strip per head, on an axis that holds what is beside it too."""
    dead = [name for name in found.values if _is_low(found.last(name))]
    strips = [
        Strip(name, partial(_draw_head, found, name), _text(found.last(name)), _is_low(found.last(name)))
        for name in found.values
    ]
    return Picture(
        _STRIPS.draw(
            "Entropy of the heads",
            f"Below their limit in iteration {found.bins[-1]}: {', '.join(dead) or 'none'}.",
            "iteration",
            max(one.end for one in (found, beside) if one is not None),
            strips,
            grid=False,
        ),
        *series_table(found, _text),
        f"Entropy over what was legal: 1 (dark) uniform, 0 (light) certain. Marked: below {LOW:g}, as good as"
        " decided. Striped: the head never had a choice.",
    )


def _is_low(value: float | None) -> bool:
    return value is not None and value < LOW


def _draw_head(found: Series, name: str, x: AxisScale, top: float) -> Iterator[Markup]:
    cells: dict[str, str] = {}
    unread, height = "", _STRIPS.height
    for place, value in zip(found.bins, found[name], strict=True):
        left, right = edges(place, x)
        if value is None:
            unread += f"M{number(left)} {number(top + height / 2)}H{number(right)}"
        else:
            shade = "warning" if _is_low(value) else shade_look(value)
            box = f"M{number(left)} {number(top)}H{number(right)}v{number(height)}H{number(left)}z"
            cells[shade] = cells.get(shade, "") + box
    yield svg.rectangle(x.start, top, x(found.bins[-1].last) - x.start, height, "track")
    yield from (svg.path(commands, shade) for shade, commands in cells.items())
    yield svg.path(unread, "unread", stroke_width=height)
