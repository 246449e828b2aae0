"""The hand-written controller for tasks with a budget: grow when training on has become the worse buy.

Compute can be doubled by training twice as long, or by training a network of twice the cost for as long. The
first takes a share of the loss away that this run shows: the slope of its loss over log2(compute). The second
is worth ``promise``, by power laws of the loss in size (Kaplan et al. 2020; compute is best shared out where
both are equal, Hoffmann et al. 2022). A block multiplies the cost by less than two and gains in proportion:
what it costs cancels. Both are relative, so they know neither the budget nor the scale of the loss, and
nothing is planned ahead.
"""

import math
from dataclasses import dataclass

import numpy as np

from esper.leyline import OP_GERMINATE, ActionSpace, EpochFacts, Head, SlotTable, legal_slots_by_op
from esper.leyline.protocols import Decisions
from esper.tamiyo.controllers import wait_everywhere
from esper.tamiyo.schedule import blueprint_index
from esper.tamiyo.trend import per_doubling


@dataclass(frozen=True, slots=True)
class CountingSettings:
    """What the counting controller goes by."""

    promise: float = 0.09
    """Share of the loss that a network of twice the cost takes away."""
    least_steps: int = 4
    least_minibatches: int = 500
    """Between the ends of a fit: on less, an early plateau looks like the end."""
    least_rise: float = math.sqrt(2.0)
    """Of the compute over a fit, half a doubling: on less, noise that happens to rise looks like the end."""
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
        for env, curve in enumerate(self._curves):
            curve.add(facts.train_loss[env], facts.minibatches[env])
            if legal[env].any() and curve.gain(self._settings) < self._settings.promise:
                slot = legal[env].argmax()
                actions[env, [Head.OP, Head.SLOT, Head.BLUEPRINT]] = OP_GERMINATE, slot, self._blueprint
                curve.grown_at = curve.now
        return Decisions(actions)


class _Curve:
    """The training loss of one environment by step, every step of equal compute.

    Not the validation loss: its few samples are the same in every step, and gain more or less than all do.
    """

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
        """Share of the loss that a doubling of compute takes away, at most: the slope and one standard error.

        Fitted over the last doubling, or what of it came after the last growth had settled; infinite while
        that is too little.
        """
        begin = max(round(settings.settling * self.grown_at), self.now // 2, 1)
        fitted = self._losses[begin:]
        if len(fitted) <= settings.least_steps or not np.isfinite(fitted).all():
            return math.inf
        if self.now < begin * settings.least_rise:
            return math.inf
        if self._minibatches[-1] - self._minibatches[begin] < settings.least_minibatches:
            return math.inf
        trend = per_doubling(np.arange(begin, self.now + 1, dtype=np.float64), fitted)
        return (trend.error - trend.slope) / trend.now
