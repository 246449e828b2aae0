"""Controller that plants the winner of a race, the default controller of ``esper.grow``.

A race trains candidate seeds for a few batches, and for comparison a copy of the network without a new seed.
RaceController reads the result of the race and decides whether the winner is worth its compute."""

from __future__ import annotations

import math
from typing import Final

from esper.leyline import ActionSpace, Decisions, EpochFacts, Head, LifecycleOp, RaceResult, SlotTable
from esper.tamiyo.heuristic import keep_or_remove
from esper.tamiyo.saturation_controller import EVALUATION, planting

ERRORS: Final = 2.0
"""Number of standard errors that the winner's lead in a race must exceed."""
PROMISE: Final = 0.01
"""Relative loss reduction that a seed must give per doubling of the compute of a step."""
LEAST_CHANGE: Final = 0.01
"""Smallest lead, relative to the loss, for which a seed is planted, however cheap the seed is."""


class RaceController:
    """Controller that plants the winner of a race and keeps or removes the seed by its contribution."""

    name = "race"

    def __init__(self, space: ActionSpace) -> None:
        self._space = space

    def reset(self, episode: int) -> None:
        """Do nothing: every decision of RaceController depends on the last facts only."""

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        actions = keep_or_remove(table, self._space.rules, EVALUATION)
        [race] = facts.races
        is_idle = actions[0, Head.OP] == LifecycleOp.WAIT
        if is_idle and race is not None and is_worthwhile(race):
            actions = planting(race.candidates[0].slot, race.candidates[0].blueprint)
        return Decisions(actions)


def is_worthwhile(race: RaceResult) -> bool:
    """Return whether the winner's lead is clear and worth the compute that its seed adds.

    All networks in a race are trained on the same batches. A seed that makes a step ``r`` times as expensive
    leaves ``1 / r`` of the steps, so the seed must lower the loss as much as ``log2(r)`` doublings of the
    training would."""
    if not race.candidates:
        return False
    best = race.candidates[0]
    price = PROMISE * math.log2(1 + best.cost)
    return best.lead > ERRORS * best.error and best.lead > max(price, LEAST_CHANGE) * abs(race.loss)
