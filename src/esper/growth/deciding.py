"""The controller of a user's loop: which one a name means, and the one that is used where none is named.

It plants when training on has become the worse buy, by the user's own metric over the compute spent, keeps
what helps and removes what does not. A rule on differences and shares: it knows no scale of the metric.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from esper.leyline import ActionSpace, Controller, EpochFacts, EsperError, Head, LifecycleOp, SlotTable
from esper.leyline.legality import legal_slots_by_op
from esper.leyline.protocols import Decisions
from esper.tamiyo import HeuristicSettings, PeriodicController, Schedule, parse_plan
from esper.tamiyo.controllers import wait_everywhere
from esper.tamiyo.heuristic import default_rotation, evaluate
from esper.tamiyo.trend import per_doubling

FAVOURITES: Final = ("conv_light", "mlp_small")
"""Planted first in feature maps and features, as in the races of ``esper.grow``: they cost little."""
COPY, OF_TOKENS_ONLY = "stack", "flex_attention"
EVALUATION: Final = HeuristicSettings()


@dataclass(frozen=True, slots=True)
class SaturationSettings:
    """When to plant; measured in the metric's progress so far."""

    promise: float = 0.3
    """Plant when the next doubling of compute would add less than this share of all progress so far. Where
    each doubling adds the same, however little, that is so after ten times the compute of the first epoch."""
    least_epochs: int = 5
    """Epochs to fit a slope on, also after a seed was planted."""
    most_failures: int = 2
    """Seeds removed, after which no more are planted: what the network lacks is not to be had from them."""
    evaluation: HeuristicSettings = EVALUATION
    """When a seed is kept or removed."""


class SaturationController:
    """One seed at a time: planted on saturation, kept or removed by its contribution, then the next."""

    name = "saturation"

    def __init__(
        self,
        space: ActionSpace,
        cost: Callable[[], float],
        epochs: int | None = None,
        settings: SaturationSettings | None = None,
    ) -> None:
        """``cost`` says what an epoch of the network costs, in any unit; ``epochs`` is the last one."""
        self._space = space
        self._cost = cost
        self._epochs = epochs
        self._settings = settings or SaturationSettings()
        names = [space.blueprint_names[index] for index in space.blueprints]
        has_tokens = OF_TOKENS_ONLY in names
        favourites = (COPY,) if has_tokens else FAVOURITES
        self._rotation = sorted(
            default_rotation(space), key=lambda index: space.blueprint_names[index] not in favourites
        )
        # Of 24 networks in experiments/021-diagnose in which one of three places was best, it was the last in
        # all 6 that have tokens, and the first in 12 of the 18 others.
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
        self._spent.append((self._spent[-1] if self._spent else 0.0) + self._cost())
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
        """Keep a seed only if the network has become better than it ever was without it.

        A network comes to rely on a seed, so that without it is worse than never having had it. Who has not
        risen by the time a seed counts as stuck, is rid of it.
        """
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
        """A seed planted now can still be evaluated."""
        if len(self._failed) >= self._settings.most_failures:
            return False
        needed = 1 + self._settings.evaluation.stuck_epochs
        return self._epochs is None or len(self._scores) + needed <= self._epochs

    def _saturated(self) -> bool:
        """Whether the next doubling of compute would add too little, by a line over its logarithm."""
        scores = self._scores
        begin = max(self._grown_at, len(scores) // 2)
        if len(scores) - begin < self._settings.least_epochs or not np.isfinite(scores).all():
            return False
        slope = per_doubling(self._spent[begin:], scores[begin:]).slope
        return slope <= self._settings.promise * (max(scores) - scores[0])


def planting(slot: int, blueprint: int) -> Decisions:
    """The decision to plant."""
    actions = wait_everywhere(1)
    actions[0, [Head.OP, Head.SLOT, Head.BLUEPRINT]] = LifecycleOp.GERMINATE, slot, blueprint
    return Decisions(actions)


def keep_or_remove(
    table: SlotTable, space: ActionSpace, settings: HeuristicSettings = EVALUATION
) -> Decisions | None:
    """What is to be done about a seed whose contribution is clear, or has been unclear for too long."""
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


def controller_of(
    wanted: Any, space: ActionSpace, cost: Callable[[], float], epochs: int | None
) -> Controller | None:
    """The controller that a user means: ``auto``, a plan, the folder of a policy, a controller, or none."""
    if wanted is None or (isinstance(wanted, Controller) and not isinstance(wanted, type)):
        return wanted
    if wanted == "auto":
        return SaturationController(space, cost, epochs)
    if isinstance(wanted, Path) or (isinstance(wanted, str) and Path(wanted).is_dir()):
        from esper.tamiyo.policy.checkpoint import load_policy  # noqa: PLC0415  only a policy needs it
        from esper.tamiyo.policy.controller import PolicyController  # noqa: PLC0415

        return PolicyController(space, 1, load_policy(Path(wanted)))
    if isinstance(wanted, str) and ("@" in wanted or ":" in wanted):
        plan = parse_plan(wanted, space)
        steps = [entry.step for entry in plan.entries] if isinstance(plan, Schedule) else []
        if 0 in steps:
            raise EsperError(
                f"plan '{wanted}' plants at step 0, and the first decision comes at the end of epoch 1; write"
                " 1, or germinate by hand before the loop"
            )
        if epochs is not None and max(steps, default=0) >= epochs:
            raise EsperError(
                f"plan '{wanted}' plants after epoch {max(steps)} of {epochs}, when no training is left for"
                " the seed; plan an earlier epoch, or train for more"
            )
        return PeriodicController(space, plan)
    if callable(wanted):
        return controller_of(wanted(space), space, cost, epochs)
    found = f"'{wanted}'" if isinstance(wanted, str) else type(wanted).__name__
    raise EsperError(
        f"controller is {found}; pass 'auto', a plan such as 'conv_light@layer2:4', the"
        " folder of a trained policy, an object with reset and decide (or a function from an action space to"
        " one), or None"
    )
