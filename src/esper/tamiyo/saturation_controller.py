"""Controller that plants a seed when more compute no longer improves the validation metric enough.

SaturationController is the default controller in a user's training loop. SaturationController keeps seeds
that improve the metric and removes all others. The decisions of SaturationController do not depend on the
scale of the metric, since they compare changes of the metric with each other."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from esper.leyline.factored_actions import Head, IntArray, LifecycleOp
from esper.leyline.rules import ActionSpace
from esper.leyline.signals import Decisions, EpochFacts
from esper.leyline.slot_table import SlotTable, legal_slots_by_op
from esper.tamiyo.controllers import planting, wait_everywhere
from esper.tamiyo.heuristic import HeuristicSettings, default_rotation, keep_or_remove
from esper.tamiyo.trend import per_doubling

FAVOURITES: Final = ("conv_light", "mlp_small")
"""Cheap blueprints, which are planted first in networks without tokens."""
COPY, OF_TOKENS_ONLY = "stack", "flex_attention"
EVALUATION: Final = HeuristicSettings()
"""Settings of the heuristic rules that keep or remove a planted seed."""
SATURATED_SHARE: Final = 0.05
"""A seed is planted if the next doubling of compute is expected to add less than 0.05 of all progress so far.

A sound MLP reaches 0.3 after 11 epochs, long before the end of its progress, and 0.05 after 60 epochs;
networks that are too small reach 0.05 after 9 to 12 epochs (ADR 0058).
"""
LEAST_EPOCHS: Final = 5
"""Smallest number of epochs to which a slope of the metric is fitted, counted from the last planting."""
MOST_FAILURES: Final = 1
"""Number of removed seeds after which SaturationController plants no more seeds."""
COMPARED_EPOCHS: Final = 3
"""Number of last epochs whose mean score decides whether a seed is kept; also its least age."""
LATEST: Final = 2 / 3
"""Fraction of the training after which no seed is planted, if the length of the training is known."""


class SaturationController:
    """Controller that plants one seed at a time on saturation of the metric, and later keeps or removes it.

    Args:
        space: Action space of the network.
        epochs: Last epoch of the training, if known.
    """

    name = "saturation"

    def __init__(self, space: ActionSpace, epochs: int | None = None) -> None:
        self._space = space
        self._epochs = epochs
        names = [space.blueprint_names[index] for index in space.blueprints]
        has_tokens = OF_TOKENS_ONLY in names
        favourites = (COPY,) if has_tokens else FAVOURITES
        self._rotation = sorted(
            default_rotation(space), key=lambda index: space.blueprint_names[index] not in favourites
        )
        # In experiments/021-diagnose the best of three sites for a seed was the last site in all 6 networks
        # with tokens, and the first site in 12 of 18 networks without tokens.
        self._downstream_first = has_tokens
        self.reset(0)

    def reset(self, episode: int) -> None:
        """Clear the recorded validation scores and the list of removed seeds."""
        self._scores: list[float] = []
        self._spent: list[float] = []
        self._grown_at, self._slope = 0, 0.0
        self._failed: set[tuple[int, int]] = set()
        self._tried: tuple[int, int] | None = None

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        self._scores.append(float(facts.val_score[0]))
        self._spent.append((self._spent[-1] if self._spent else 0.0) + float(facts.cost[0]))
        if self._tried is not None and table.blueprint[0, self._tried[0]] != self._tried[1]:
            self._failed.add(self._tried)
            self._tried = None
        if not table.live.any() and self._saturated() and self._worthwhile():
            return Decisions(self._plant(table))
        return Decisions(self._confirmed(keep_or_remove(table, self._space.rules, EVALUATION)))

    def _confirmed(self, actions: IntArray) -> IntArray:
        """Replace FOSSILIZE by WAIT, and after ``stuck_epochs`` epochs by PRUNE, unless the seed pays.

        A network that was trained with a seed depends on it, so switching the seed off overestimates its
        contribution. The scores of the last epochs must exceed the best score before planting, by more than
        the trend before planting would have added for the compute spent since."""
        since, before = self._scores[self._grown_at :], self._scores[: self._grown_at]
        if actions[0, Head.OP] != LifecycleOp.FOSSILIZE or not (since and before):
            return actions
        doublings = math.log2(self._spent[-1] / self._spent[self._grown_at - 1])
        needed = max(before) + max(self._slope, 0.0) * doublings
        if len(since) >= COMPARED_EPOCHS and float(np.mean(since[-COMPARED_EPOCHS:])) > needed:
            return actions
        if len(since) < EVALUATION.stuck_epochs:
            return wait_everywhere(1)
        actions[0, Head.OP] = LifecycleOp.PRUNE
        return actions

    def _plant(self, table: SlotTable) -> IntArray:
        free = legal_slots_by_op(table, self._space.rules)[0][LifecycleOp.GERMINATE]
        for slot in sorted(np.flatnonzero(free).tolist(), reverse=self._downstream_first):
            for blueprint in self._rotation:
                pair = (slot, int(blueprint))
                if pair not in self._failed and pair not in self._space.unfit:
                    self._tried, self._grown_at = pair, len(self._scores)
                    return planting(*pair)
        return wait_everywhere(1)

    def _worthwhile(self) -> bool:
        """Return whether few enough seeds have failed and enough epochs are left to evaluate a new seed."""
        if len(self._failed) >= MOST_FAILURES:
            return False
        needed = 1 + EVALUATION.stuck_epochs
        last = math.inf if self._epochs is None else min(LATEST * self._epochs, self._epochs - needed)
        return len(self._scores) <= last

    def _saturated(self) -> bool:
        """Return whether the score is predicted to rise too little in the next doubling of compute."""
        scores = self._scores
        begin = max(self._grown_at, len(scores) // 2)
        if len(scores) - begin < LEAST_EPOCHS or not np.isfinite(scores).all():
            return False
        self._slope = per_doubling(self._spent[begin:], scores[begin:]).slope
        return self._slope <= SATURATED_SHARE * (max(scores) - scores[0])
