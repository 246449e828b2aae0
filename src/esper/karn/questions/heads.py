"""Is a head dead: the normalised entropy of every head in every iteration, where it had a choice."""

from __future__ import annotations

from dataclasses import dataclass

from esper.karn.questions.places import Place, axis_of
from esper.karn.run import Run
from esper.leyline.columns import COLUMNS


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


def heads(run: Run) -> Heads | None:
    """Of a training; None: there was no update yet."""
    axis = axis_of(run, None)
    names = run.row.heads
    means = ", ".join(f"avg(head_entropy[{index + 1}])" for index in range(len(names)))
    found = run.sql(
        f"SELECT min(iteration), max(iteration), {means} FROM update GROUP BY {axis.group('iteration')} ORDER BY 1"
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
