"""Training of a host, its blended seeds and its incubating seeds: one minibatch, and one epoch.

The gradients of the host and of each seed are clipped separately; one optimiser updates host and seeds.

A checked minibatch with a non-finite loss or gradient changes no weight. For an unchecked minibatch the
optimiser step is always taken, and loss and norms stay on the device until the end of the epoch. An
epoch with non-finite losses or gradients is undone and run again with a check of every minibatch.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.kasmina.device_work import DeviceWork
from esper.kasmina.incubation import Loss, gradient_summary, shadow_loss, statistics_from, tensor_norms
from esper.kasmina.network import MorphogeneticModel
from esper.kasmina.recovery import Recovery
from esper.leyline import GradientStatistics, SlotTable
from esper.tolaria.devices import HOST, Precision
from esper.tolaria.tasks.spec import Objective


@dataclass(slots=True)
class MinibatchResult:
    """Loss, output and gradient norms of one minibatch; every tensor stays on the device of the network."""

    loss: Tensor
    output: Tensor
    host_norm: Tensor
    seed_norms: list[Tensor] = field(default_factory=list)
    shadow_losses: list[Tensor] = field(default_factory=list)
    seeds: dict[int, Tensor] = field(default_factory=dict)
    """Gradient norms ``[tensor]`` of every seed's parameters, by slot; empty unless requested."""
    skipped: bool = False
    """Whether the loss or a gradient was non-finite, so that no weight was changed."""
    broken: list[int] = field(default_factory=list)
    """Slots of incubating seeds whose loss or gradient was non-finite."""


@dataclass(frozen=True, slots=True)
class Learner:
    """Network with the loss, optimiser, gradient clipping and precision of its training."""

    model: MorphogeneticModel
    optimiser: Optimizer
    """Optimiser of the host, with a parameter group for each seed."""
    loss: Loss
    clip: float
    """Largest norm of the gradient of the host, and of each seed, after clipping."""
    precision: Precision = field(default_factory=Precision)

    def run(self, x: Tensor, y: Tensor, *, measure: bool = False, look: bool = True) -> MinibatchResult:
        """Take one training step of host and seeds.

        Args:
            x: Inputs of the minibatch.
            y: Targets of the minibatch.
            measure: Whether to return the gradient norms of the seeds in addition to the norm of the host.
            look: Whether to check loss and gradients, and skip the optimiser step if one is non-finite.
                Without ``look`` nothing is read from the device, and the optimiser step is always taken.
        """
        model = self.model
        model.drop_gradients()
        with self.precision.autocast():
            output = model(x)
            value = self.loss(output, y)
        blended = {slot: model.seed_parameters(slot) for slot in model.blended}
        part = self.precision.part(HOST, [*model.host_parameters(), *chain(*blended.values())])
        part.backward(value)
        gradients = {slot: _gradients(own) for slot, own in blended.items()}
        host_norm = clip_gradients(_gradients(model.host_parameters()), self.clip)
        result = MinibatchResult(value.detach(), output.detach(), host_norm)
        if measure:
            result.seeds = {slot: tensor_norms(own) for slot, own in gradients.items() if own}
        result.seed_norms = [clip_gradients(own, self.clip) for own in gradients.values() if own]
        if look:
            finite = _is_finite(host_norm, *result.seed_norms) or part.may_overflow
            result.skipped = not (finite and _is_finite(value))
            if result.skipped:
                part.drop()
                return result
        for slot in model.incubating:
            self._incubate(slot, x, y, result, measure=measure, look=look)
        part.accept()
        self.optimiser.step()
        return result

    def _incubate(
        self, slot: int, x: Tensor, y: Tensor, result: MinibatchResult, *, measure: bool, look: bool
    ) -> None:
        """Compute the gradients of an incubating seed on its shadow branch, before any weight changes."""
        with self.precision.autocast():
            value = shadow_loss(self.model, slot, x, y, self.loss, look=look)
        if look and not _is_finite(value):
            result.broken.append(slot)
            return
        part = self.precision.part(slot, self.model.seed_parameters(slot))
        part.backward(value)
        gradients = _gradients(self.model.seed_parameters(slot))
        if not gradients:
            return
        if measure:
            result.seeds[slot] = tensor_norms(gradients)
        norm = clip_gradients(gradients, self.clip)
        if look and not (_is_finite(norm) or part.may_overflow):
            result.broken.append(slot)
            part.drop()
            return
        result.shadow_losses.append(value.detach())
        result.seed_norms.append(norm)
        part.accept()


def _is_finite(*values: Tensor) -> bool:
    return all(math.isfinite(value.item()) for value in values)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def clip_gradients(gradients: list[Tensor], limit: float) -> Tensor:
    """Scale ``gradients`` to a total norm of at most ``limit``; return the norm before scaling."""
    total = torch.linalg.vector_norm(tensor_norms(gradients))
    # The clipping factor is computed in float64, so that it equals a quotient of Python floats.
    factor = torch.full_like(total, limit, dtype=torch.float64).div_(total).clamp_(max=1.0).float()
    # This private torch function scales all gradients in one call; its check for non-finite values is not
    # used.
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, torch.zeros_like(factor), factor)
    return total


# --- one epoch ----------------------------------------------------------------------------------------


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
            {slot: statistics_from(list(islice(values, 3))) for slot in seeds},
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
        ratio = statistics.norm / trained.host_norm if trained.host_norm > 0 else math.nan
        table.record_gradients(0, slot, statistics, ratio=ratio)
