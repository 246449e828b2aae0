"""One minibatch of training for a host, its blended seeds and its incubating seeds.

The gradients of the host and of each seed are clipped separately; one optimiser updates host and seeds.

A checked minibatch with a non-finite loss or gradient changes no weight. For an unchecked minibatch the
optimiser step is always taken, and loss and norms stay on the device."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.kasmina.health import tensor_norms
from esper.kasmina.incubation import Loss, shadow_loss
from esper.kasmina.network import MorphogeneticModel
from esper.tolaria.precision import HOST, Precision


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
