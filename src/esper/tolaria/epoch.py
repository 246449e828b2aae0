"""Training of one epoch of minibatches, with or without a check of every minibatch.

Without checks, losses are read from the device only at the end of the epoch. An epoch with non-finite losses
or gradients is undone and run again with a check of every minibatch."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from esper.kasmina.device_work import DeviceWork
from esper.kasmina.health import gradient_summary, statistics_from, statistics_of
from esper.kasmina.recovery import Recovery
from esper.leyline.slot_table import GradientStatistics, SlotTable
from esper.tolaria.minibatch import Learner, MinibatchResult
from esper.tolaria.objective import Objective
from esper.tolaria.precision import Precision


@dataclass(frozen=True, slots=True)
class EpochTraining:
    """Loss, score and gradient norms of one epoch of training; NaN if every minibatch was skipped."""

    loss: float
    score: float
    host_norm: float
    skipped: int
    seeds: dict[int, GradientStatistics]
    broken: bool = False
    """Whether the epoch ended early, because a minibatch was non-finite and no seed was the cause."""
    skipped_steps: int = 0
    """Number of optimiser steps that a float16 loss scaler skipped."""


class UnreadEpoch:
    """Epoch of unchecked minibatches: losses are first read from the device at the end of the epoch."""

    def __init__(self, learner: Learner, objective: Objective) -> None:
        self._learner = learner
        self._objective = objective
        self._results: list[MinibatchResult] = []
        self._scores: list[Tensor] = []

    def train(self, x: Tensor, y: Tensor, *, last: bool) -> None:
        """Train on one minibatch; if it is the last of the epoch, gradients of the seeds are measured."""
        result = self._learner.run(x, y, measure=last, look=False)
        self._scores.append(self._objective.sample_scores(result.output, y).mean())
        del result.output  # The outputs of all minibatches together would take too much memory.
        self._results.append(result)

    def read(self) -> DeviceWork[EpochTraining | None]:
        """Return mean loss, score and gradient norms of the epoch; ``None`` if a number is non-finite."""
        results = self._results
        if not results:
            return EpochTraining(math.nan, math.nan, math.nan, 0, {})
        columns = [
            [result.loss for result in results],
            self._scores,
            [result.host_norm for result in results],
            [norm for result in results for norm in result.seed_norms],
            [loss for result in results for loss in result.shadow_losses] + self._weights(),
        ]
        numbers = torch.stack([value.float() for column in columns for value in column])
        seeds = results[-1].seeds
        found = yield torch.cat([numbers, *map(gradient_summary, seeds.values())])
        values = iter(found.tolist())
        losses, scores, norms, seed_norms, others = (list(islice(values, len(column))) for column in columns)
        precision = self._learner.precision
        # With float16, non-finite gradient norms are no error: the loss scaler has skipped those steps.
        checked = losses + others + ([] if precision.scales else norms + seed_norms)
        if not all(map(math.isfinite, checked)) or precision.overflows:
            return None
        statistics = {slot: statistics_from(list(islice(values, 3))) for slot in seeds}
        return _summary(losses, scores, norms, precision, statistics)

    def _weights(self) -> list[Tensor]:
        """Return the norms of all weights of incubating seeds.

        Infinite weights are not visible in the loss of a seed with tanh or ReLU.
        """
        model = self._learner.model
        own = [tensor for slot in model.incubating for tensor in model.slots[slot].held.floats()]
        return list(torch._foreach_norm(own)) if own else []


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


def train_looking(
    learner: Learner,
    batches: Iterable[tuple[Tensor, Tensor]],
    objective: Objective,
    recovery: Recovery,
    before_batch: Callable[[int], bool],
) -> EpochTraining:
    """Train on ``batches`` and check every minibatch for non-finite values.

    Args:
        learner: Network with optimiser and loss.
        batches: Inputs and targets of every minibatch.
        objective: Loss and score of the task.
        recovery: Object that removes seeds that cause a non-finite loss or gradient.
        before_batch: Function that is called with the number of a minibatch before its training; returns
            whether the minibatch is the last of the epoch.
    """
    losses, scores, norms, skipped, broken = [], [], [], 0, False
    seeds: dict[int, GradientStatistics] = {}
    for number, (x, y) in enumerate(batches):
        result = learner.run(x, y, measure=before_batch(number), look=True)
        if result.broken:
            recovery.remove_broken(result.broken)
        if result.skipped:
            skipped += 1
            broken = not recovery.remove_guilty(x, y)
            if broken:
                break
            continue
        losses.append(result.loss.item())
        scores.append(objective.sample_scores(result.output, y).mean().item())
        norms.append(result.host_norm.item())
        healthy = (slot for slot in result.seeds if slot not in result.broken)
        seeds = {slot: statistics_of(result.seeds[slot]) for slot in healthy}
    return _summary(losses, scores, norms, learner.precision, seeds, skipped, broken)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def record_gradients(table: SlotTable, trained: EpochTraining) -> None:
    """Store the gradient statistics of all seeds after an epoch in the slot table; gate G2 reads them."""
    for slot, statistics in trained.seeds.items():
        ratio = statistics.norm / trained.host_norm if trained.host_norm > 0 else math.nan
        table.record_gradients(0, slot, statistics, ratio=ratio)
