"""Evaluation of controllers on a recording, with one family of networks left out of the fit at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from esper.growbench.instances import Plan
from esper.growbench.replay import UNRECORDED, Cell, Features
from esper.growbench.store import RecordingError
from esper.karn.statistics import Estimate, estimate


class RecordedController(Protocol):
    """Rule that decides at every decision point whether a block is inserted."""

    def fit(self, cells: Sequence[Cell]) -> None:
        """Learn from cells of other families than the one that is evaluated."""

    def grows(self, observation: Features) -> bool:
        """Return whether to insert a block; ``observation`` has the features of ``FEATURES``, then whether
        each is known."""


class Evaluation(NamedTuple):
    """Regrets of a controller."""

    by_instance: dict[int, float]
    """Regret in percent of the loss by instance, as a mean over its rng seeds."""
    refused: float
    """Share of decisions that were not recorded, so that the other action was taken."""

    @property
    def mean(self) -> Estimate:
        """Mean regret with its 95 % interval over instances."""
        return estimate(list(self.by_instance.values()))


def evaluate(cells: Sequence[Cell], make: Callable[[], RecordedController]) -> Evaluation:
    """Return the regrets of a controller on every cell, fitted without the family of the cell.

    Args:
        cells: Cells of a recording.
        make: Function that returns a new controller.

    Raises:
        RecordingError: The cells are of one family, so that nothing is left to learn from.
    """
    regrets: dict[int, list[float]] = {}
    refused = decided = 0
    families = list(dict.fromkeys(cell.first.family for cell in cells))
    if len(families) < 2:
        raise RecordingError(f"the cells are of {len(families)} families; a controller needs at least 2")
    for family in families:
        controller = make()
        controller.fit([cell for cell in cells if cell.first.family != family])
        for cell in (cell for cell in cells if cell.first.family == family):
            plan, count, points = play(cell, controller)
            regrets.setdefault(cell.first.instance, []).append(cell.regret(plan))
            refused, decided = refused + count, decided + points
    return Evaluation(
        {number: float(np.mean(values)) for number, values in regrets.items()}, refused / decided
    )


def play(cell: Cell, controller: RecordedController) -> tuple[Plan, int, int]:
    """Return the plan that a controller carries out, how many of its decisions were not recorded, and the
    number of decisions."""
    node = refused = decided = 0
    while node >= 0:
        action = int(controller.grows(cell.observations[node]))
        if cell.children[node, action] == UNRECORDED:
            action, refused = 1 - action, refused + 1
        node, decided = int(cell.children[node, action]), decided + 1
    return list(cell.plans)[-2 - node], refused, decided
