"""Controller that plants a seed when the metric saturates over the compute spent.

SaturationController is the default controller in a user's training loop. It keeps seeds that help and removes
other seeds. Its rules use differences and shares only, so they do not depend on the scale of the metric."""

from __future__ import annotations

from typing import Final

import numpy as np

from esper.leyline.factored_actions import Head, IntArray, LifecycleOp
from esper.leyline.legality import legal_slots_by_op
from esper.leyline.protocols import Decisions
from esper.leyline.rules import ActionSpace
from esper.leyline.signals import EpochFacts
from esper.leyline.slot_table import SlotTable
from esper.tamiyo.controllers import wait_everywhere
from esper.tamiyo.heuristic import HeuristicSettings, default_rotation, keep_or_remove
from esper.tamiyo.trend import per_doubling

FAVOURITES: Final = ("conv_light", "mlp_small")
"""Cheap blueprints, which are planted first in feature maps and features."""
COPY, OF_TOKENS_ONLY = "stack", "flex_attention"
EVALUATION: Final = HeuristicSettings()
"""Thresholds for keeping and removing a seed."""
SATURATED_SHARE: Final = 0.3
"""Plant when the next doubling of compute is expected to add less than 0.3 of all progress so far.

If each doubling adds the same progress, the controller plants after ten times the compute of the first epoch.
"""
LEAST_EPOCHS: Final = 5
"""Smallest number of epochs for fitting a slope, also after a seed was planted."""
MOST_FAILURES: Final = 2
"""Number of removed seeds after which no more seeds are planted."""


class SaturationController:
    """Controller that plants one seed at a time on saturation, and keeps or removes it by its contribution.

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
        # In experiments/021-diagnose the best of three sites was the last site in all 6 networks with tokens,
        # and the first site in 12 of 18 other networks.
        self._downstream_first = has_tokens
        self.reset(0)

    def reset(self, episode: int) -> None:
        """Clear the recorded scores and the number of removed seeds."""
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
        """Replace FOSSILIZE by WAIT or PRUNE until the network is better than its best before the seed.

        A trained network depends on its seed, so switching the seed off overestimates its contribution. A
        seed is removed as stuck if the network does not improve on its best before the seed."""
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
        """Return whether a seed planted now can still be evaluated."""
        if len(self._failed) >= MOST_FAILURES:
            return False
        needed = 1 + EVALUATION.stuck_epochs
        return self._epochs is None or len(self._scores) + needed <= self._epochs

    def _saturated(self) -> bool:
        """Return whether a line fitted over log compute predicts too little gain for the next doubling."""
        scores = self._scores
        begin = max(self._grown_at, len(scores) // 2)
        if len(scores) - begin < LEAST_EPOCHS or not np.isfinite(scores).all():
            return False
        slope = per_doubling(self._spent[begin:], scores[begin:]).slope
        return slope <= SATURATED_SHARE * (max(scores) - scores[0])


def planting(slot: int, blueprint: int) -> IntArray:
    """Return the action ``[1, 8]`` that germinates ``blueprint`` in ``slot``."""
    actions = wait_everywhere(1)
    actions[0, [Head.OP, Head.SLOT, Head.BLUEPRINT]] = LifecycleOp.GERMINATE, slot, blueprint
    return actions
