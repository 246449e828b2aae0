"""Controller that plants a seed when the metric saturates over the compute spent.

The default in a user's training loop. It keeps seeds that help and removes the others. The rule uses
differences and shares only, so it does not depend on the scale of the metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from esper.leyline import ActionSpace, EpochFacts, Head, LifecycleOp, SlotTable
from esper.leyline.legality import legal_slots_by_op
from esper.leyline.protocols import Decisions
from esper.tamiyo.controllers import wait_everywhere
from esper.tamiyo.heuristic import HeuristicSettings, default_rotation, evaluate
from esper.tamiyo.trend import per_doubling

FAVOURITES: Final = ("conv_light", "mlp_small")
"""Blueprints to plant first in feature maps and features, because they cost little."""
COPY, OF_TOKENS_ONLY = "stack", "flex_attention"
EVALUATION: Final = HeuristicSettings()


@dataclass(frozen=True, slots=True)
class SaturationSettings:
    """Thresholds for planting, relative to the metric's progress so far."""

    promise: float = 0.3
    """Plant when the next doubling of compute is expected to add less than this share of all progress so far.
    If each doubling adds the same amount, that holds after ten times the compute of the first epoch."""
    least_epochs: int = 5
    """Smallest number of epochs for fitting a slope, also after a seed was planted."""
    most_failures: int = 2
    """Number of removed seeds after which no more are planted."""
    evaluation: HeuristicSettings = EVALUATION
    """Thresholds for keeping and removing a seed."""


class SaturationController:
    """Plants one seed at a time on saturation, and keeps or removes it by its contribution.

    Args:
        space: Action space of the network.
        epochs: Last epoch of the training, if known.
        settings: Thresholds.
    """

    name = "saturation"

    def __init__(
        self, space: ActionSpace, epochs: int | None = None, settings: SaturationSettings | None = None
    ) -> None:
        self._space = space
        self._epochs = epochs
        self._settings = settings or SaturationSettings()
        names = [space.blueprint_names[index] for index in space.blueprints]
        has_tokens = OF_TOKENS_ONLY in names
        favourites = (COPY,) if has_tokens else FAVOURITES
        self._rotation = sorted(
            default_rotation(space), key=lambda index: space.blueprint_names[index] not in favourites
        )
        # In experiments/021-diagnose the best of three sites was the last one in all 6 networks with tokens,
        # and the first one in 12 of 18 others.
        self._downstream_first = has_tokens
        self.reset(0)

    def reset(self, episode: int) -> None:
        """Forget scores and failures."""
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
        decided = keep_or_remove(table, self._space, self._settings.evaluation)
        if decided is not None:
            return self._confirmed(decided)
        if not table.live.any() and self._saturated() and self._worthwhile():
            return self._plant(table)
        return Decisions(wait_everywhere(1))

    def _confirmed(self, decided: Decisions) -> Decisions:
        """Replace fossilizing by waiting or pruning until the network is better than it ever was without the
        seed.

        A trained network depends on its seed, so switching the seed off overestimates its contribution. A
        seed without such an improvement is removed when it counts as stuck."""
        planted, op = self._grown_at, decided.actions[0, Head.OP]
        since, before = self._scores[planted:], self._scores[:planted]
        if op != LifecycleOp.FOSSILIZE or not since or float(np.mean(since)) > max(before):
            return decided
        if len(since) < self._settings.evaluation.stuck_epochs:
            return Decisions(wait_everywhere(1))
        actions = decided.actions.copy()
        actions[0, Head.OP] = LifecycleOp.PRUNE
        return Decisions(actions)

    def _plant(self, table: SlotTable) -> Decisions:
        free = legal_slots_by_op(table, self._space.rules)[0][LifecycleOp.GERMINATE]
        for slot in sorted(np.flatnonzero(free).tolist(), reverse=self._downstream_first):
            for blueprint in self._rotation:
                pair = (slot, int(blueprint))
                if pair not in self._failed and pair not in self._space.unfit:
                    self._tried, self._grown_at = pair, len(self._scores)
                    return planting(*pair)
        return Decisions(wait_everywhere(1))

    def _worthwhile(self) -> bool:
        """Return whether a seed planted now can still be evaluated."""
        if len(self._failed) >= self._settings.most_failures:
            return False
        needed = 1 + self._settings.evaluation.stuck_epochs
        return self._epochs is None or len(self._scores) + needed <= self._epochs

    def _saturated(self) -> bool:
        """Return whether the next doubling of compute adds too little, by a line fitted over log compute."""
        scores = self._scores
        begin = max(self._grown_at, len(scores) // 2)
        if len(scores) - begin < self._settings.least_epochs or not np.isfinite(scores).all():
            return False
        slope = per_doubling(self._spent[begin:], scores[begin:]).slope
        return slope <= self._settings.promise * (max(scores) - scores[0])


def planting(slot: int, blueprint: int) -> Decisions:
    """Return the decision to germinate."""
    actions = wait_everywhere(1)
    actions[0, [Head.OP, Head.SLOT, Head.BLUEPRINT]] = LifecycleOp.GERMINATE, slot, blueprint
    return Decisions(actions)


def keep_or_remove(
    table: SlotTable, space: ActionSpace, settings: HeuristicSettings = EVALUATION
) -> Decisions | None:
    """Return the decision about a seed whose contribution is clear, or has been unclear for too long."""
    legal = legal_slots_by_op(table, space.rules)[0]
    worthy, unwanted = evaluate(table, space.rules, settings)
    value = np.nan_to_num(table.contribution[0])
    for op, candidates, preference in (
        (LifecycleOp.FOSSILIZE, worthy[0] & legal[LifecycleOp.FOSSILIZE], value),
        (LifecycleOp.PRUNE, unwanted[0] & legal[LifecycleOp.PRUNE], -value),
    ):
        if candidates.any():
            actions = wait_everywhere(1)
            actions[0, [Head.OP, Head.SLOT]] = op, np.where(candidates, preference, -np.inf).argmax()
            return Decisions(actions)
    return None
