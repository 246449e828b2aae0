"""Contributions and pair interactions of seeds, from on/off configurations.

Drawn as a matrix of slots with contributions on the diagonal.
"""

from collections.abc import Mapping
from itertools import combinations
from typing import Final, NamedTuple

from esper.karn.drawing import svg
from esper.karn.drawing.picture import Picture
from esper.karn.drawing.style import shade_look
from esper.karn.metric import Metric, metric_of
from esper.karn.questions.episode_selection import THIS_EPISODE, default_episode, episode_name
from esper.karn.run import Run

Configuration = tuple[bool, ...]
_LEFT: Final = 100.0
_CELL_WIDTH: Final = 110.0
_CELL: Final = 38.0
_TOP: Final = 24.0
_PALEST: Final = 0.4
"""Shade of the darkest cell, light enough for the number on it."""


class Interactions(NamedTuple):
    """One episode at the last epoch whose configurations were scored."""

    name: str
    """Name of the episode."""
    epoch: int
    slots: tuple[str, ...]
    """Slots that were switched on and off."""
    score: float
    """Score with all slots on."""
    metric: Metric
    matrix: tuple[tuple[float | None, ...], ...]
    """Contribution of a slot on the diagonal, interaction of two slots elsewhere; None if unknown."""


def interactions(run: Run) -> Interactions | None:
    """Return the interactions of the default episode; None if no configuration was scored."""
    episode, metric = default_episode(run), metric_of(run.row)
    if episode is None:
        return None
    found = run.sql(
        f"""
        SELECT epoch, "on", {metric.name} FROM counterfactual WHERE {THIS_EPISODE}
        AND {metric.name} IS NOT NULL
        AND epoch = (SELECT max(epoch) FROM counterfactual WHERE {THIS_EPISODE})
        """,
        [*episode, *episode],
    ).fetchall()
    if not found:
        return None
    switched = [slot for slot in range(len(run.row.slots)) if len({on[slot] for _, on, _ in found}) > 1]
    scores = {tuple(on[slot] for slot in switched): score for _, on, score in found}
    everything = (True,) * len(switched)
    if not switched or everything not in scores:  # a killed run may have written only some configurations
        return None
    return Interactions(
        name=episode_name(run, episode),
        epoch=found[0][0],
        slots=tuple(run.row.slots[slot] for slot in switched),
        score=scores[everything],
        metric=metric,
        matrix=tuple(
            tuple(metric.gained(_effect(scores, {first, second})) for second in range(len(switched)))
            for first in range(len(switched))
        ),
    )


def _effect(scores: Mapping[Configuration, float], slots: set[int]) -> float | None:
    """v(all) − v(without one), or v(all) − v(without i) − v(without j) + v(without both)."""
    all_slots = range(len(next(iter(scores))))
    removals = [off for count in range(len(slots) + 1) for off in combinations(slots, count)]
    found = [(len(off), scores.get(tuple(slot not in off for slot in all_slots))) for off in removals]
    known = [(-1) ** count * score for count, score in found if score is not None]
    return sum(known) if len(known) == len(found) else None


def draw_interactions(found: Interactions, compared: Interactions | None = None) -> Picture:
    """Draw the matrix of the switched slots; ``compared`` is unused, a matrix shares no axes."""
    size, metric = len(found.slots), found.metric
    unit = metric.unit or f" {metric.name}"
    width = min(_CELL_WIDTH, (svg.WIDTH - _LEFT) / size)
    letters = int(width / svg.LETTER)
    strongest = max((abs(value) for row in found.matrix for value in row if value is not None), default=0.0)
    drawn = [
        svg.text(_LEFT + (index + 0.5) * width, 15, svg.shorten(slot, letters), "dim", "middle")
        + svg.text(_LEFT - 8, _TOP + (index + 0.5) * _CELL + 5, svg.shorten(slot, 9), "", "end")
        for index, slot in enumerate(found.slots)
    ]
    for first, row in enumerate(found.matrix):
        for second, value in enumerate(row):
            left, top = _LEFT + second * width, _TOP + first * _CELL
            look = "strong" if first == second else ""
            shade = shade_look(_PALEST * abs(value or 0.0) / (strongest or 1.0))
            cell = svg.rectangle(left, top, width, _CELL, f"cell {shade}")
            text = svg.text(left + width / 2, top + _CELL / 2 + 5, metric.gain(value), look, "middle")
            drawn.append(svg.group(cell, text))
    return Picture(
        svg=svg.drawing(
            _TOP + size * _CELL + 4,
            "Pair interactions",
            f"{metric.name.capitalize()} {metric.text(found.score)} with all of {', '.join(found.slots)} on.",
            *drawn,
        ),
        columns=["slot", *found.slots],
        rows=[[slot, *map(metric.gain, row)] for slot, row in zip(found.slots, found.matrix, strict=True)],
        caption=(
            f"{found.name.capitalize()}, epoch {found.epoch}, {metric.text(found.score)}{unit} with all"
            f" seeds on. Bold: {metric.lost} without the slot. Elsewhere: what two slots add beyond their"
            " own; negative: they do the same work."
        ),
    )
