"""The hand-written controller for tasks with a budget: grow when training on has become the worse buy.

Both buys are shares of the loss, so they know neither the budget nor the scale of the loss, and nothing is
planned ahead. Training on: what a doubling of the compute spent so far takes away, the slope of the loss over
log2(compute) fitted on this run. Growing: a network of twice the cost is worth ``per_doubling`` of the loss
(a power law in size; Kaplan et al. 2020 find 5 %), so a seed that multiplies the cost of a minibatch by f
promises ``per_doubling`` · log2 f.
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

    per_doubling: float = 0.07
    """Share of the loss that a network of twice the cost takes away."""
    least_steps: int = 4
    least_minibatches: int = 500
    """Between the ends of a fit: on less, an early plateau looks like the end."""
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
        self._curves = [_Curve() for _ in range(num_envs)]

    def reset(self, episode: int) -> None:
        """Forget the losses; every environment begins anew."""
        self._curves = [_Curve() for _ in self._curves]

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        actions = wait_everywhere(table.num_envs)
        legal = legal_slots_by_op(table, self._space.rules)[:, OP_GERMINATE]
        promise = self._settings.per_doubling * np.log2(facts.growth_factor)
        for env, curve in enumerate(self._curves):
            curve.add(facts.val_loss[env], facts.minibatches[env])
            if legal[env].any() and curve.gain(self._settings) < promise[env]:
                slot = legal[env].argmax()
                actions[env, [Head.OP, Head.SLOT, Head.BLUEPRINT]] = OP_GERMINATE, slot, self._blueprint
                curve.grown_at = curve.now
        return Decisions(actions)


class _Curve:
    """The validation loss of one environment by step, every step of equal compute."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._minibatches: list[int] = []
        self.grown_at = 0

    @property
    def now(self) -> int:
        return len(self._losses) - 1

    def add(self, loss: float, minibatches: int) -> None:
        self._losses.append(loss)
        self._minibatches.append(minibatches)

    def gain(self, settings: CountingSettings) -> float:
        """Share of the loss that the next doubling of compute would take away; infinite while unknown.

        Fitted over the last doubling, or what of it came after the last growth had settled.
        """
        begin = max(round(settings.settling * self.grown_at), self.now // 2, 1)
        fitted = self._losses[begin:]
        if len(fitted) <= settings.least_steps:
            return np.inf
        if self._minibatches[-1] - self._minibatches[begin] < settings.least_minibatches:
            return np.inf
        doublings: FloatArray = np.log2(np.arange(begin, self.now + 1) / self.now)
        slope, loss_now = np.polyfit(doublings, fitted, 1)
        return float(-slope / loss_now)
