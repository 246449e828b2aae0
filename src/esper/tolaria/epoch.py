"""Training of one epoch of minibatches, with or without a check of every minibatch.

Without checks, losses are read from the device only at the end of the epoch. An epoch with non-finite losses
or gradients is undone and run again with a check of every minibatch."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from esper.kasmina.device_work import DeviceWork
from esper.kasmina.health import GradientStatistics, gradient_summary
from esper.kasmina.recovery import Recovery
from esper.leyline.slot_table import SlotTable
from esper.tolaria.minibatch import Learner, MinibatchResult
from esper.tolaria.objective import Objective


@dataclass(frozen=True, slots=True)
class EpochTraining:
    """Loss, score and gradient norms of one epoch of training; NaN if no minibatch changed the weights."""

    loss: float = math.nan
    score: float = math.nan
    host_norm: float = math.nan
    skipped: int = 0
    seeds: dict[int, GradientStatistics] = field(default_factory=dict)
    broken: bool = False
    """Whether the epoch ended early, because a minibatch was non-finite and no seed was the cause."""
    skipped_steps: int = 0
    """Number of optimiser steps that a float16 loss scaler skipped."""
    finite: bool = True
    """Whether all losses and gradient norms of the epoch are finite."""


class Epoch:
    """Epoch of minibatches; losses are first read from the device at the end of the epoch."""

    def __init__(self, learner: Learner, objective: Objective) -> None:
        self._learner = learner
        self._objective = objective
        self._results: list[MinibatchResult] = []
        self._scores: list[Tensor] = []
        self._skipped, self._broken = 0, False

    def train(self, x: Tensor, y: Tensor, *, last: bool, look: bool = False) -> MinibatchResult:
        """Train on one minibatch; if it is the last of the epoch, gradients of the seeds are measured.

        ``look`` is whether to check loss and gradients, as in ``Learner.run``.
        """
        result = self._learner.run(x, y, measure=last, look=look)
        if not result.skipped:
            self._scores.append(self._objective.sample_scores(result.output, y).mean())
            self._results.append(result)
        del result.output  # The outputs of all minibatches together would take too much memory.
        return result

    def train_looking(
        self,
        batches: Iterable[tuple[Tensor, Tensor]],
        recovery: Recovery,
        before_batch: Callable[[int], bool],
    ) -> None:
        """Train on ``batches`` and check every minibatch for non-finite values.

        Args:
            batches: Inputs and targets of every minibatch.
            recovery: Object that removes seeds that cause a non-finite loss or gradient.
            before_batch: Function that is called with the number of a minibatch before its training; returns
                whether the minibatch is the last of the epoch.
        """
        for number, (x, y) in enumerate(batches):
            result = self.train(x, y, last=before_batch(number), look=True)
            for slot in result.broken:
                result.seeds.pop(slot, None)
            if result.broken:
                recovery.remove_broken(result.broken)
            if result.skipped:
                self._skipped += 1
                self._broken = not recovery.remove_guilty(x, y)
            if self._broken:
                break

    def read(self) -> DeviceWork[EpochTraining]:
        """Return mean loss, score and gradient norms of the epoch."""
        results, precision = self._results, self._learner.precision
        skipped_steps = precision.take_skipped_steps()
        if not results:
            return EpochTraining(skipped=self._skipped, broken=self._broken, skipped_steps=skipped_steps)
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
        # With float16, non-finite gradient norms are no error: the loss scaler has skipped those steps.
        checked = losses + others + ([] if precision.scales else norms + seed_norms)
        return EpochTraining(
            _mean(losses),
            _mean(scores),
            _mean([norm for norm in norms if math.isfinite(norm)]),
            self._skipped,
            {slot: GradientStatistics.of(list(islice(values, 3))) for slot in seeds},
            self._broken,
            skipped_steps,
            finite=all(map(math.isfinite, checked)) and not precision.overflows,
        )

    def _weights(self) -> list[Tensor]:
        """Return the norms of all weights of incubating seeds.

        Infinite weights are not visible in the loss of a seed with tanh or ReLU.
        """
        model = self._learner.model
        own = [tensor for slot in model.incubating for tensor in model.slots[slot].held.floats()]
        return list(torch._foreach_norm(own)) if own else []


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def record_gradients(table: SlotTable, trained: EpochTraining) -> None:
    """Store the gradient statistics of all seeds after an epoch in the slot table; gate G2 reads them."""
    for slot, statistics in trained.seeds.items():
        table.record_gradients(
            0,
            slot,
            norm=statistics.norm,
            ratio=statistics.norm / trained.host_norm if trained.host_norm > 0 else math.nan,
            health=statistics.health,
            vanishing=statistics.vanishing,
            exploding=statistics.exploding,
        )
