"""Training: one minibatch through host, blended seeds and incubating seeds.

The host is clipped and stepped on its own gradients alone; every seed has its own clip and
optimiser. A minibatch whose loss or gradient is not finite changes no weight at all.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.kasmina.health import GradientStatistics, gradient_statistics
from esper.kasmina.incubation import Loss, shadow_loss
from esper.kasmina.model import MorphogeneticModel
from esper.tolaria.objective import Objective


@dataclass(slots=True)
class BatchFacts:
    """What one minibatch showed; ``broken`` names incubating seeds that became non-finite."""

    loss: float
    output: Tensor
    host_norm: float
    skipped: bool = False
    broken: list[int] = field(default_factory=list)
    seeds: dict[int, GradientStatistics] = field(default_factory=dict)


def train_batch(
    model: MorphogeneticModel,
    optimiser: Optimizer,
    x: Tensor,
    y: Tensor,
    loss: Loss,
    *,
    clip: float,
    measure: bool = False,
) -> BatchFacts:
    """One step of host and seeds; ``measure`` also takes the seeds' gradient statistics."""
    model.drop_gradients()
    output = model(x)
    value = loss(output, y)
    value.backward()
    straight = model.rules.incubation == "straight_through"
    joined = model.blended + (model.incubating if straight else [])
    gradients = {slot: _gradients(model.seed_parameters(slot)) for slot in joined}
    facts = BatchFacts(
        value.item(), output.detach(), clip_gradients(_gradients(model.host_parameters()), clip)
    )
    if measure:
        facts.seeds = _statistics(gradients)
    norms = {slot: clip_gradients(gradients[slot], clip) for slot in joined}
    blended = (norms[slot] for slot in model.blended)
    if not all(map(math.isfinite, (facts.loss, facts.host_norm, *blended))):
        facts.skipped = True
        return facts
    if straight:
        facts.broken = [s for s in model.incubating if model.slot(s).poisoned or not math.isfinite(norms[s])]
    else:
        _incubate(model, y, loss, clip, facts, measure)
    optimiser.step()
    for slot in joined:
        if slot not in facts.broken:
            _step(model, slot)
    return facts


def _incubate(
    model: MorphogeneticModel, y: Tensor, loss: Loss, clip: float, facts: BatchFacts, measure: bool
) -> None:
    """Let every incubating seed learn on its shadow branch, before the host's weights move."""
    for slot in model.incubating:
        value = shadow_loss(model, slot, y, loss)
        if not torch.isfinite(value):
            facts.broken.append(slot)
            continue
        value.backward()
        gradients = _gradients(model.seed_parameters(slot))
        if measure:
            facts.seeds.update(_statistics({slot: gradients}))
        if math.isfinite(clip_gradients(gradients, clip)):
            _step(model, slot)
        else:
            facts.broken.append(slot)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _statistics(gradients: dict[int, list[Tensor]]) -> dict[int, GradientStatistics]:
    measured = {slot: gradient_statistics(grads) for slot, grads in gradients.items()}
    return {slot: statistics for slot, statistics in measured.items() if statistics is not None}


def _step(model: MorphogeneticModel, slot: int) -> None:
    optimiser = model.slot(slot).optimiser
    if optimiser is None:
        raise RuntimeError(f"the seed in slot {model.slot_config.slot_ids[slot]} has no optimiser")
    optimiser.step()


def clip_gradients(gradients: list[Tensor], limit: float) -> float:
    """Scale ``gradients`` down to a total norm of ``limit``; returns the norm before."""
    total = total_norm(gradients)
    if limit < total < math.inf:
        torch._foreach_mul_(gradients, limit / total)
    return total


def total_norm(tensors: list[Tensor]) -> float:
    """The norm of all tensors together."""
    if not tensors:
        return 0.0
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors))))


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


class Supervisor(Protocol):
    """Removes seeds that break while an epoch is trained."""

    def remove_broken(self, slots: list[int]) -> None:
        """Incubating seeds that are no longer finite; the host has not noticed."""

    def remove_guilty(self, x: Tensor, y: Tensor) -> bool:
        """A minibatch was left out as non-finite: remove the seed behind it, if there is one."""


def train_epoch(
    model: MorphogeneticModel,
    optimiser: Optimizer,
    batches: Sequence[tuple[Tensor, Tensor]],
    objective: Objective,
    supervisor: Supervisor,
    *,
    clip: float,
    before_batch: Callable[[int], None],
) -> EpochTraining:
    """Train on ``batches`` of (inputs, targets); ``before_batch`` is told the number of each."""
    model.train()
    losses, scores, norms, skipped, broken = [], [], [], 0, False
    seeds: dict[int, GradientStatistics] = {}
    for number, (x, y) in enumerate(batches):
        before_batch(number)
        last = number == len(batches) - 1
        facts = train_batch(model, optimiser, x, y, objective.loss, clip=clip, measure=last)
        if facts.broken:
            supervisor.remove_broken(facts.broken)
        if facts.skipped:
            skipped += 1
            broken = not supervisor.remove_guilty(x, y)
            if broken:
                break
            continue
        losses.append(facts.loss)
        scores.append(objective.sample_scores(facts.output, y).mean().item())
        norms.append(facts.host_norm)
        seeds = {slot: found for slot, found in facts.seeds.items() if slot not in facts.broken}
    return EpochTraining(_mean(losses), _mean(scores), _mean(norms), skipped, seeds, broken)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
