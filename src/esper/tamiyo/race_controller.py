"""Controller that plants the winner of a race, the default controller of ``esper.grow``.

A race trains candidate seeds for a few batches, and for comparison a copy of the network without a new seed.
RaceController reads the result of a race and plants the winner if the reduction of the loss is worth the
compute that the winner adds."""

from __future__ import annotations

import math
from typing import Final

from esper.leyline import ActionSpace, Decisions, EpochFacts, Head, LifecycleOp, RaceResult, SlotTable
from esper.tamiyo.controllers import planting
from esper.tamiyo.heuristic import keep_or_remove
from esper.tamiyo.saturation_controller import EVALUATION

ERRORS: Final = 2.0
"""Number of standard errors by which the winner's loss must be below the loss of the network without it."""
PROMISE: Final = 0.01
"""Relative loss reduction that a seed must reach for each doubling of the compute per step."""
LEAST_CHANGE: Final = 0.01
"""Smallest relative loss reduction for which a seed is planted, even if the seed adds no compute."""


class RaceController:
    """Controller that plants the winner of a race, and later keeps or removes it by its contribution."""

    name = "race"

    def __init__(self, space: ActionSpace) -> None:
        self._space = space

    def reset(self, episode: int) -> None:
        """Do nothing, since RaceController decides from the last facts and the last slot table alone."""

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        actions = keep_or_remove(table, self._space.rules, EVALUATION)
        [race] = facts.races
        is_idle = actions[0, Head.OP] == LifecycleOp.WAIT
        if is_idle and race is not None and is_worthwhile(race):
            actions = planting(race.candidates[0].slot, race.candidates[0].blueprint)
        return Decisions(actions)


def is_worthwhile(race: RaceResult) -> bool:
    """Return whether the race winner's loss reduction is significant and worth the compute that it adds.

    All networks in a race are trained on the same batches. A seed that multiplies the compute of a step by
    ``r`` leaves compute for ``1 / r`` of the steps, so the seed must lower the loss by more than
    ``log2(r)`` doublings of the number of steps would."""
    if not race.candidates:
        return False
    best = race.candidates[0]
    price = PROMISE * math.log2(1 + best.cost)
    return best.lead > ERRORS * best.error and best.lead > max(price, LEAST_CHANGE) * abs(race.loss)
