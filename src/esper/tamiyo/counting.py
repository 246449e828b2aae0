"""Rule-based controller for tasks with a compute budget: germinate when longer training helps too little.

Compute can be doubled by training twice as long, or by training a network of twice the cost. The relative
loss reduction by longer training is the slope of the training loss over log2(compute), fitted to the present
run. The relative loss reduction by a larger network is the setting ``promise``, taken from power laws of the
loss in model size (Kaplan et al. 2020). Compute is allocated best where longer training and a larger network
reduce the loss equally (Hoffmann et al. 2022). A block that adds less than a doubling of the cost is expected
to reduce the loss by a proportionate part of ``promise``, so the decision does not depend on the cost of a
block. Loss reductions are relative, so the decision depends neither on the budget nor on the scale of the
loss.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from esper.leyline import OP_GERMINATE, ActionSpace, Decisions, EpochFacts, SlotTable, legal_slots_by_op
from esper.tamiyo.controllers import planting, wait_everywhere
from esper.tamiyo.schedule import blueprint_index
from esper.tamiyo.trend import per_doubling


@dataclass(frozen=True, slots=True)
class CountingSettings:
    """Settings of the counting controller."""

    promise: float = 0.09
    """Relative loss reduction expected from a network of twice the cost."""
    least_steps: int = 4
    least_minibatches: int = 500
    """Smallest number of minibatches that a fit of the loss spans; a shorter span can be an early plateau."""
    least_rise: float = math.sqrt(2.0)
    """Smallest ratio of end compute to start compute of a loss fit; below it noise dominates the slope."""
    settling: float = 1.25
    """After a germination at compute C, fits of the loss start at compute ``settling`` · C."""
    blueprint: str = "stack"


class CountingController:
    """Controller that germinates in the first free slot when longer training helps less than a larger
    network.

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
            curve.losses.append(facts.train_loss[env])
            curve.minibatches.append(facts.minibatches[env])
            if legal[env].any() and curve.gain(self._settings) < self._settings.promise:
                actions[env] = planting(legal[env].argmax(), self._blueprint)
                curve.grown_at = curve.now
        return Decisions(actions)


@dataclass(slots=True)
class _Curve:
    """Training loss of one environment by step; every step spends the same compute.

    The validation loss is not used, because it is a mean over few samples and its trend is noisy.
    """

    losses: list[float] = field(default_factory=list)
    minibatches: list[int] = field(default_factory=list)
    grown_at: int = 0

    @property
    def now(self) -> int:
        return len(self.losses) - 1

    def gain(self, settings: CountingSettings) -> float:
        """Return an upper estimate of the relative loss reduction per doubling of compute.

        The estimate is (standard error − slope) / fitted present loss, for a line fitted to the losses of the
        last doubling of compute, without the steps just after a germination. The estimated loss reduction is
        infinite while there are too few losses for a fit.
        """
        begin = max(round(settings.settling * self.grown_at), self.now // 2, 1)
        fitted = self.losses[begin:]
        if len(fitted) <= settings.least_steps or not np.isfinite(fitted).all():
            return math.inf
        if self.now < begin * settings.least_rise:
            return math.inf
        if self.minibatches[-1] - self.minibatches[begin] < settings.least_minibatches:
            return math.inf
        trend = per_doubling(np.arange(begin, self.now + 1, dtype=np.float64), fitted)
        return (trend.error - trend.slope) / trend.now
