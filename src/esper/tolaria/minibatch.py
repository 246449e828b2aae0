"""One minibatch through host, blended seeds and incubating seeds.

The host is clipped and stepped on its own gradients alone; every seed has its own clip and optimiser.

A minibatch can be looked at before any weight moves: one whose loss or gradient is not finite then changes
nothing at all. Or it is run without a look, and everything it shows stays on its device.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.kasmina.incubation import Loss, shadow_loss
from esper.kasmina.model import MorphogeneticModel
from esper.tolaria.precision import HOST, Precision


@dataclass(slots=True)
class Readings:
    """What one minibatch showed, not read yet: every tensor is where it was computed."""

    loss: Tensor
    output: Tensor
    host_norm: Tensor
    seed_norms: list[Tensor] = field(default_factory=list)
    shadow_losses: list[Tensor] = field(default_factory=list)
    seeds: dict[int, Tensor] = field(default_factory=dict)
    """Gradient norms ``[tensor]`` of the seeds, where they were asked for."""
    skipped: bool = False
    """It was looked at, and not finite: no weight moved."""
    broken: list[int] = field(default_factory=list)
    """Incubating seeds that were looked at and are no longer finite."""


def train_batch(
    model: MorphogeneticModel,
    optimiser: Optimizer,
    x: Tensor,
    y: Tensor,
    loss: Loss,
    *,
    clip: float,
    measure: bool = False,
) -> Readings:
    """One step of host and seeds, looked at; ``measure`` also takes the norms of the seeds' gradients."""
    return Learner(model, optimiser, loss, clip).run(x, y, measure=measure, look=True)


@dataclass(frozen=True, slots=True)
class Learner:
    """A model with all that moves its weights."""

    model: MorphogeneticModel
    optimiser: Optimizer
    """The host's."""
    loss: Loss
    clip: float
    """Of the gradient's norm, for the host and for each seed."""
    precision: Precision = field(default_factory=Precision)

    def run(self, x: Tensor, y: Tensor, *, measure: bool, look: bool) -> Readings:
        """One step of host and seeds, taken if everything about it is finite.

        Without ``look`` nothing is read, and the step is taken in any case.
        """
        model = self.model
        model.drop_gradients()
        with self.precision.autocast():
            output = model(x)
            value = self.loss(output, y)
        straight = model.rules.incubation == "straight_through"
        joined = model.blended + (model.incubating if straight else [])
        step = self.precision.step_of(HOST, [self.optimiser, *map(self._seed_optimiser, joined)])
        step.backward(value)
        gradients = {slot: _gradients(model.seed_parameters(slot)) for slot in joined}
        host_norm = clip_gradients(_gradients(model.host_parameters()), self.clip)
        shown = Readings(value.detach(), output.detach(), host_norm)
        if measure:
            shown.seeds = {slot: tensor_norms(own) for slot, own in gradients.items() if own}
        norms = {slot: clip_gradients(own, self.clip) for slot, own in gradients.items() if own}
        shown.seed_norms = [norms[slot] for slot in model.blended if slot in norms]
        if look:
            finite = _is_finite(host_norm, *shown.seed_norms) or step.may_overflow
            shown.skipped = not (finite and _is_finite(value))
            if shown.skipped:
                step.drop()
                return shown
            ghosts = model.incubating if straight else []
            shown.broken = [s for s in ghosts if model.slot(s).poisoned or not _is_finite(norms[s])]
            for slot in shown.broken:
                step.leave_out(self._seed_optimiser(slot))
        if not straight:
            for slot in model.incubating:
                self._incubate(slot, y, shown, measure=measure, look=look)
        step.take()
        return shown

    def _incubate(self, slot: int, y: Tensor, shown: Readings, *, measure: bool, look: bool) -> None:
        """Let an incubating seed learn on its shadow branch, before the host's weights move."""
        with self.precision.autocast():
            value = shadow_loss(self.model, slot, y, self.loss, look=look)
        if look and not _is_finite(value):
            shown.broken.append(slot)
            return
        step = self.precision.step_of(slot, [self._seed_optimiser(slot)])
        step.backward(value)
        gradients = _gradients(self.model.seed_parameters(slot))
        if not gradients:
            return
        if measure:
            shown.seeds[slot] = tensor_norms(gradients)
        norm = clip_gradients(gradients, self.clip)
        if look and not (_is_finite(norm) or step.may_overflow):
            shown.broken.append(slot)
            return
        shown.shadow_losses.append(value.detach())
        shown.seed_norms.append(norm)
        step.take()

    def _seed_optimiser(self, slot: int) -> Optimizer:
        optimiser = self.model.slot(slot).optimiser
        if optimiser is None:
            raise RuntimeError(f"the seed in slot {self.model.slot_config.slot_ids[slot]} has no optimiser")
        return optimiser


def _is_finite(*values: Tensor) -> bool:
    return all(math.isfinite(value.item()) for value in values)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def clip_gradients(gradients: list[Tensor], limit: float) -> Tensor:
    """Scale ``gradients`` down to a total norm of ``limit``; returns the norm before, without reading it."""
    total = torch.linalg.vector_norm(tensor_norms(gradients))
    # In double: limit / norm is then the number that it would be outside of torch.
    factor = torch.full_like(total, limit, dtype=torch.float64).div_(total).clamp_(max=1.0).float()
    # One call for all tensors; that it also notes what is not finite costs nothing.
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, torch.zeros_like(factor), factor)
    return total


def tensor_norms(tensors: list[Tensor]) -> Tensor:
    """The norm of each tensor, ``[tensor]``."""
    return torch.stack(torch._foreach_norm(tensors))
