"""Controller that plants a seed when more compute no longer improves the validation metric enough.

SaturationController is the default controller in a user's training loop. SaturationController keeps seeds
that improve the metric and removes all others. The decisions of SaturationController do not depend on the
scale of the metric, since they compare changes of the metric with each other."""

from __future__ import annotations

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
SATURATED_SHARE: Final = 0.3
"""A seed is planted if the next doubling of compute is expected to add less than 0.3 of all progress so far.

If each doubling of compute adds the same progress, a seed is planted after ten times the compute of the first
epoch.
"""
LEAST_EPOCHS: Final = 5
"""Smallest number of epochs to which a slope of the metric is fitted, counted from the last planting."""
MOST_FAILURES: Final = 2
"""Number of removed seeds after which SaturationController plants no more seeds."""


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
        self._grown_at = 0
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
        """Replace FOSSILIZE by WAIT or PRUNE unless the mean score since planting exceeds all earlier scores.

        A network that was trained with a seed depends on it, so switching the seed off overestimates its
        contribution. If the mean score since planting does not exceed all earlier scores, the seed is pruned
        after ``stuck_epochs`` epochs."""
        since, before = self._scores[self._grown_at :], self._scores[: self._grown_at]
        is_kept = actions[0, Head.OP] == LifecycleOp.FOSSILIZE
        if not (is_kept and since and before) or float(np.mean(since)) > max(before):
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
        return self._epochs is None or len(self._scores) + needed <= self._epochs

    def _saturated(self) -> bool:
        """Return whether the score is predicted to rise too little in the next doubling of compute."""
        scores = self._scores
        begin = max(self._grown_at, len(scores) // 2)
        if len(scores) - begin < LEAST_EPOCHS or not np.isfinite(scores).all():
            return False
        slope = per_doubling(self._spent[begin:], scores[begin:]).slope
        return slope <= SATURATED_SHARE * (max(scores) - scores[0])
