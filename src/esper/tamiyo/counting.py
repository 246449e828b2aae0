"""The hand-written controller for tasks with a budget: grow when training on has become the worse buy.

The network as it stands is worth what it gains by going on: the slope of its loss over the logarithm of the
compute spent, fitted on this run. Growth is worth ``promise``. Both are relative to the loss, per doubling of
compute, so they know neither the budget nor the scale of the loss, and nothing is planned ahead.
"""

from dataclasses import dataclass

import numpy as np

from esper.leyline import OP_GERMINATE, ActionSpace, EpochFacts, Head, SlotTable, legal_slots_by_op
from esper.leyline.protocols import Decisions
from esper.leyline.signals import FloatArray
from esper.tamiyo.controllers import wait_everywhere
from esper.tamiyo.schedule import blueprint_index


@dataclass(frozen=True, slots=True)
class CountingSettings:
    """What the counting controller goes by."""

    promise: float = 0.065
    """Share of the loss that a doubling of compute takes away once the network is large enough."""
    least_steps: int = 6
    """Steps to fit a slope on."""
    settling: float = 1.25
    """A new seed disturbs the loss until the compute is so many times that of its birth."""
    blueprint: str = "stack"


class CountingController:
    """Plants copies upstream first, each when ``num_envs`` environments, one by one, gain too little."""

    name = "counting"

    def __init__(self, space: ActionSpace, num_envs: int, settings: CountingSettings | None = None) -> None:
        self._space = space
        self._settings = settings or CountingSettings()
        self._blueprint = blueprint_index(self._settings.blueprint, space)
        self._losses: list[list[float]] = [[] for _ in range(num_envs)]
        self._grown_at = [0] * num_envs

    def reset(self, episode: int) -> None:
        """Forget the losses; every environment begins anew."""
        self._losses = [[] for _ in self._losses]
        self._grown_at = [0] * len(self._losses)

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        actions = wait_everywhere(table.num_envs)
        legal = legal_slots_by_op(table, self._space.rules)[:, OP_GERMINATE]
        for env, loss in enumerate(facts.val_loss.tolist()):
            self._losses[env].append(loss)
            if legal[env].any() and self._gain(env) < self._settings.promise:
                actions[env, [Head.OP, Head.SLOT, Head.BLUEPRINT]] = (
                    OP_GERMINATE,
                    legal[env].argmax(),
                    self._blueprint,
                )
                self._grown_at[env] = len(self._losses[env]) - 1
        return Decisions(actions)

    def _gain(self, env: int) -> float:
        """Share of the loss that the next doubling of compute would take away; infinite while unknown."""
        losses = self._losses[env]
        now = len(losses) - 1
        begin = max(round(self._settings.settling * self._grown_at[env]), now // 2, 1)
        if now - begin < self._settings.least_steps:
            return np.inf
        steps: FloatArray = np.arange(begin, now + 1, dtype=np.float64)
        slope, _ = np.polyfit(np.log2(steps), losses[begin:], 1)
        return float(-slope / np.mean(losses[-self._settings.least_steps :]))
