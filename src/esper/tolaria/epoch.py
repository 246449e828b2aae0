"""An epoch of minibatches, read when it is over, or looked at minibatch by minibatch.

As a rule nothing of an epoch is read before its end. One that turns out not to be finite is run again,
looking.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from esper.kasmina.health import GradientStatistics, statistics_of
from esper.tolaria.minibatch import Learner
from esper.tolaria.objective import Objective
from esper.tolaria.precision import Precision


@dataclass(frozen=True, slots=True)
class EpochTraining:
    """What one epoch of minibatches showed; NaN where every minibatch was skipped."""

    loss: float
    score: float
    host_norm: float
    skipped: int
    seeds: dict[int, GradientStatistics]
    broken: bool = False
    """Ended early: a minibatch was not finite, and no seed could be removed for it."""
    skipped_steps: int = 0
    """Steps that a float16 scaler left out."""


class UnreadEpoch:
    """An epoch whose minibatches are run without a look: nothing waits for a device before its end."""

    def __init__(self, learner: Learner, objective: Objective) -> None:
        self._learner = learner
        self._objective = objective
        self._losses: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._seed_norms: list[Tensor] = []
        self._shadow_losses: list[Tensor] = []
        self._seeds: dict[int, Tensor] = {}

    def train(self, x: Tensor, y: Tensor, *, last: bool) -> None:
        """One minibatch; the last one measures the seeds' gradients."""
        shown = self._learner.run(x, y, measure=last, look=False)
        self._losses.append(shown.loss)
        self._scores.append(self._objective.sample_scores(shown.output, y).mean())
        self._norms.append(shown.host_norm)
        self._seed_norms += shown.seed_norms
        self._shadow_losses += shown.shadow_losses
        self._seeds = shown.seeds

    def read(self) -> EpochTraining | None:
        """What the epoch showed; ``None`` if a number that should be finite is not."""
        if not self._losses:
            return EpochTraining(math.nan, math.nan, math.nan, 0, {})
        losses, scores, norms, seed_norms, others = _read(
            self._losses, self._scores, self._norms, self._seed_norms, self._shadow_losses + self._weights()
        )
        precision = self._learner.precision
        # A gradient that overflowed its scale is the scaler's to answer for, and it has.
        checked = losses + others + ([] if precision.scales else norms + seed_norms)
        if not all(map(math.isfinite, checked)) or precision.overflows:
            return None
        seeds = {slot: statistics_of(found) for slot, found in self._seeds.items()}
        return _summary(losses, scores, norms, precision, seeds)

    def _weights(self) -> list[Tensor]:
        """Norms of incubating seeds' weights: tanh and ReLU hide those that are infinite."""
        model = self._learner.model
        own = [tensor for slot in model.incubating for tensor in model.slot(slot).floats()]
        return list(torch._foreach_norm(own)) if own else []


def _read(*columns: list[Tensor]) -> list[list[float]]:
    """Numbers out of tensors, in one copy from the device."""
    read = iter(torch.stack([value.float() for column in columns for value in column]).tolist())
    return [list(islice(read, len(column))) for column in columns]


def _summary(
    losses: list[float],
    scores: list[float],
    norms: list[float],
    precision: Precision,
    seeds: dict[int, GradientStatistics],
    skipped: int = 0,
    broken: bool = False,
) -> EpochTraining:
    finite = [norm for norm in norms if math.isfinite(norm)]
    means = _mean(losses), _mean(scores), _mean(finite)
    return EpochTraining(*means, skipped, seeds, broken, precision.take_skipped_steps())


class Supervisor(Protocol):
    """Removes seeds that break while an epoch is trained."""

    def remove_broken(self, slots: list[int]) -> None:
        """Incubating seeds that are no longer finite; the host has not noticed."""

    def remove_guilty(self, x: Tensor, y: Tensor) -> bool:
        """A minibatch was left out as non-finite: remove the seed behind it, if there is one."""


def train_looking(
    learner: Learner,
    batches: Iterable[tuple[Tensor, Tensor]],
    objective: Objective,
    supervisor: Supervisor,
    before_batch: Callable[[int], bool],
) -> EpochTraining:
    """Train on ``batches`` and look at each; ``before_batch`` gets its number and says if it is the last."""
    losses, scores, norms, skipped, broken = [], [], [], 0, False
    seeds: dict[int, GradientStatistics] = {}
    for number, (x, y) in enumerate(batches):
        shown = learner.run(x, y, measure=before_batch(number), look=True)
        if shown.broken:
            supervisor.remove_broken(shown.broken)
        if shown.skipped:
            skipped += 1
            broken = not supervisor.remove_guilty(x, y)
            if broken:
                break
            continue
        losses.append(shown.loss.item())
        scores.append(objective.sample_scores(shown.output, y).mean().item())
        norms.append(shown.host_norm.item())
        healthy = (slot for slot in shown.seeds if slot not in shown.broken)
        seeds = {slot: statistics_of(shown.seeds[slot]) for slot in healthy}
    return _summary(losses, scores, norms, learner.precision, seeds, skipped, broken)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
