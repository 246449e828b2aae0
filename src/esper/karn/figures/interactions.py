"""Do seeds help or hinder each other: contributions on the diagonal, pair interactions beside it."""

from __future__ import annotations

from typing import Final

from esper.karn import notation
from esper.karn.figures import svg
from esper.karn.figures.picture import Picture
from esper.karn.figures.style import shade_look
from esper.karn.figures.svg import Markup
from esper.karn.questions.episodes import EpisodeKey, episode_name, is_training
from esper.karn.questions.interactions import Interactions, interactions
from esper.karn.run import Run

_LEFT: Final = 100.0
_CELL_WIDTH: Final = 110.0
_CELL: Final = 38.0
_TOP: Final = 24.0
_PALEST: Final = 0.4
"""The darkest cell, so that the number on it stays readable."""


def interactions_picture(run: Run, episode: EpisodeKey | None = None) -> Picture | None:
    """The answer of one episode; without one, of the run's default episode."""
    found = interactions(run, episode)
    if found is None:
        return None
    return draw_interactions(found, episode_name(found.episode, trained=is_training(run)))


def draw_interactions(found: Interactions, name: str) -> Picture:
    """A matrix of the slots that were switched."""
    size = len(found.slots)
    width = min(_CELL_WIDTH, (svg.WIDTH - _LEFT) / size)
    letters = int(width / svg.LETTER)
    headings = [
        svg.text(_LEFT + (index + 0.5) * width, 15, svg.shorten(slot, letters), "dim", "middle")
        for index, slot in enumerate(found.slots)
    ]
    strongest = max((abs(value) for row in found.matrix for value in row if value is not None), default=0.0)
    cells = [
        _draw_cell(value, strongest, (_LEFT + second * width, _TOP + first * _CELL, width), first == second)
        for first, row in enumerate(found.matrix)
        for second, value in enumerate(row)
    ]
    names = [
        svg.text(_LEFT - 8, _TOP + (index + 0.5) * _CELL + 5, svg.shorten(slot, 9), "", "end")
        for index, slot in enumerate(found.slots)
    ]
    return Picture(
        svg=svg.drawing(
            _TOP + size * _CELL + 4,
            "Pair interactions",
            f"Score {notation.points(found.score)} with all of {', '.join(found.slots)} on.",
            *headings,
            *names,
            *cells,
        ),
        columns=["slot", *found.slots],
        rows=[
            [slot, *(notation.gain(value) for value in row)]
            for slot, row in zip(found.slots, found.matrix, strict=True)
        ],
        caption=(
            f"{name.capitalize()}, epoch {found.epoch}, {notation.points(found.score)} points with all seeds"
            " on. Bold: points lost without the slot. Elsewhere: what two slots add beyond their own;"
            " negative: they do the same work."
        ),
    )


def _draw_cell(
    value: float | None, strongest: float, box: tuple[float, float, float], is_own: bool
) -> Markup:
    left, top, width = box
    fraction = 0.0 if value is None or not strongest else _PALEST * abs(value) / strongest
    return svg.group(
        [
            svg.rectangle(left, top, width, _CELL, f"cell {shade_look(fraction)}"),
            svg.text(
                left + width / 2,
                top + _CELL / 2 + 5,
                notation.gain(value),
                "strong" if is_own else "",
                "middle",
            ),
        ]
    )
