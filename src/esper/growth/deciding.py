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
from esper.tamiyo.heuristic import default_rotation, evaluate, slot_ranks

COPY: Final = "stack"


@dataclass(frozen=True, slots=True)
class SaturationSettings:
    """When to plant; measured in the metric's progress so far."""

    promise: float = 0.1
    """Plant when the next doubling of compute would add less than this share of all progress so far."""
    least_epochs: int = 5
    """Epochs to fit a slope on, also after a seed was planted."""
    evaluation: HeuristicSettings = HeuristicSettings()  # noqa: RUF009  frozen
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
        names = space.blueprint_names
        strongest = default_rotation(space)
        self._rotation = sorted(strongest, key=lambda index: names[index] != COPY)
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
        rules = self._space.rules
        legal = legal_slots_by_op(table, rules)[0]
        worthy, unwanted = evaluate(table, rules, self._settings.evaluation)
        value = np.nan_to_num(table.contribution[0])
        actions = wait_everywhere(1)
        for op, candidates, preference in (
            (LifecycleOp.FOSSILIZE, worthy[0] & legal[LifecycleOp.FOSSILIZE], value),
            (LifecycleOp.PRUNE, unwanted[0] & legal[LifecycleOp.PRUNE], -value),
        ):
            if candidates.any():
                actions[0, [Head.OP, Head.SLOT]] = op, np.where(candidates, preference, -np.inf).argmax()
                return Decisions(actions)
        if not table.live.any() and self._saturated() and self._worthwhile():
            self._plant(actions, table, legal[LifecycleOp.GERMINATE])
        return Decisions(actions)

    def _plant(self, actions: Any, table: SlotTable, free: Any) -> None:
        ranks = slot_ranks(table.enabled)[0]
        for slot in sorted(np.flatnonzero(free).tolist(), key=lambda index: float(ranks[index])):
            for blueprint in self._rotation:
                pair = (slot, int(blueprint))
                if pair not in self._failed and pair not in self._space.unfit:
                    actions[0, [Head.OP, Head.SLOT, Head.BLUEPRINT]] = LifecycleOp.GERMINATE, *pair
                    self._tried, self._grown_at = pair, len(self._scores)
                    return

    def _worthwhile(self) -> bool:
        """A seed planted now can still be evaluated."""
        needed = 1 + self._settings.evaluation.stuck_epochs
        return self._epochs is None or len(self._scores) + needed <= self._epochs

    def _saturated(self) -> bool:
        """Whether the next doubling of compute would add too little, by a line over its logarithm."""
        scores = self._scores
        begin = max(self._grown_at, len(scores) // 2)
        if len(scores) - begin < self._settings.least_epochs or not np.isfinite(scores).all():
            return False
        slope, _ = np.polyfit(np.log2(self._spent[begin:]), scores[begin:], 1)
        progress = max(scores) - scores[0]
        return bool(slope <= self._settings.promise * progress)


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
    if isinstance(wanted, str):
        plan = parse_plan(wanted, space)
        if isinstance(plan, Schedule) and any(entry.step == 0 for entry in plan.entries):
            raise EsperError(
                f"plan '{wanted}' plants at step 0, and the first decision comes at the end of epoch 1; write"
                " 1, or germinate by hand before the loop"
            )
        return PeriodicController(space, plan)
    if callable(wanted):
        return controller_of(wanted(space), space, cost, epochs)
    raise EsperError(
        f"controller is {type(wanted).__name__}; pass 'auto', a plan such as 'conv_light@layer2:4', the"
        " folder of a trained policy, an object with reset and decide (or a function from an action space to"
        " one), or None"
    )
