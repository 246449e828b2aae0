"""Rule-based controller for tasks with a compute budget: germinate when longer training gains too little.

Compute can be doubled by training twice as long, or by training a network of twice the cost. The relative
loss reduction of longer training is the slope of the loss over log2(compute), fitted to the present run. The
relative loss reduction of a larger network is ``promise``, from power laws of the loss in model size (Kaplan
et al. 2020). Compute is allocated best where the two reductions are equal (Hoffmann et al. 2022). A block
that multiplies the cost by less than two gains in proportion, so the cost of a block cancels. The two
reductions are relative, so neither the budget nor the scale of the loss enters.
"""

import math
from dataclasses import dataclass

import numpy as np

from esper.leyline import OP_GERMINATE, ActionSpace, Decisions, EpochFacts, Head, SlotTable, legal_slots_by_op
from esper.tamiyo.controllers import wait_everywhere
from esper.tamiyo.schedule import blueprint_index
from esper.tamiyo.trend import per_doubling


@dataclass(frozen=True, slots=True)
class CountingSettings:
    """Settings of the counting controller."""

    promise: float = 0.09
    """Relative loss reduction expected from a network of twice the cost."""
    least_steps: int = 4
    least_minibatches: int = 500
    """Smallest number of minibatches in a fit; with fewer, an early plateau looks like saturation."""
    least_rise: float = math.sqrt(2.0)
    """Smallest ratio of compute at the end and start of a fit; with less, noise looks like saturation."""
    settling: float = 1.25
    """Ratio of compute to compute at the last germination from which losses are used in a fit again."""
    blueprint: str = "stack"


class CountingController:
    """Controller that germinates in the most upstream free slot when training gains less than ``promise``.

    Each of the ``num_envs`` environments has its own loss curve.
    """

    name = "counting"

    def __init__(self, space: ActionSpace, num_envs: int, settings: CountingSettings | None = None) -> None:
        self._space = space
        self._settings = settings or CountingSettings()
        self._blueprint = blueprint_index(self._settings.blueprint, space)
        self._curves = [_Curve() for _ in range(num_envs)]

    def reset(self, episode: int) -> None:
        """Clear the loss curves of all environments."""
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
    """Training loss of one environment by step; every step has the same compute.

    The validation loss is not used: it has few samples, so its trend can differ from the true trend.
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
        """Return an upper estimate of the relative loss reduction per doubling of compute.

        The estimate is (−slope + standard error) / present loss, fitted to the last doubling of compute after
        the last germination has settled. The estimate is infinite while there are too few points for a fit.
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
