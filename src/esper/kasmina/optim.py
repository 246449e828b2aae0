"""Optimisers of seeds and learning-rate schedules.

A seed's optimiser has the host's class and settings, and is an object of its own.

The host's optimiser and scheduler are never touched: adding a parameter group would break or
rescale common schedulers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

ScheduleKind = Literal["cosine", "wsd"]
DECAY_SHARE: Final = 0.2
"""Last part of an episode in which a warmup-stable-decay schedule falls to zero."""


@dataclass(frozen=True, slots=True)
class OptimiserRecipe:
    """How to make an optimiser like the host's."""

    kind: type[Optimizer]
    settings: dict[str, Any]

    @classmethod
    def of(cls, optimiser: Optimizer) -> OptimiserRecipe:
        """The recipe of an existing optimiser, at its initial learning rate."""
        accepted = inspect.signature(type(optimiser).__init__).parameters
        settings = {name: value for name, value in optimiser.defaults.items() if name in accepted}
        return cls(type(optimiser), settings)

    @property
    def learning_rate(self) -> float:
        return float(self.settings["lr"])

    def make(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return self.kind(list(parameters), **self.settings)


def cosine_rate(base: float, progress: float) -> float:
    """``base`` at progress 0, zero at 1."""
    return base * 0.5 * (1.0 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))


def wsd_factor(progress: float, minibatch: int, warmup: int) -> float:
    """Warmup-stable-decay (Hu et al. 2024): rises over ``warmup`` minibatches, rests at 1, ends at 0.

    The fall is linear over the last ``DECAY_SHARE`` of the episode.
    """
    return min(1.0, (minibatch + 1) / (warmup + 1), max((1.0 - progress) / DECAY_SHARE, 0.0))


def copy_moments(
    source: Optimizer, old: Iterable[nn.Parameter], target: Optimizer, new: Iterable[nn.Parameter]
) -> None:
    """Give the parameters ``new`` of ``target`` what ``source`` has gathered for ``old``."""
    for theirs, ours in zip(old, new, strict=True):
        if theirs in source.state:
            target.state[ours] = clone_tree(source.state[theirs])


def clone_tree(tree: Any) -> Any:
    """A copy of nested dictionaries and lists that shares no tensor with the original."""
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: clone_tree(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [clone_tree(value) for value in tree]
    return tree


def step_together(optimisers: Sequence[Optimizer]) -> None:
    """One step of each: of plain SGD with momentum in a few calls for all, to the same bits; else one by one.

    Between convolutions, which leave nothing of Python in the cache, a call of ``step`` costs as much as a
    small layer.
    """
    parts = [_moving(optimiser) for optimiser in optimisers]
    found = [part for part in parts if part is not None]
    for optimiser, part in zip(optimisers, parts, strict=True):
        if part is None:
            optimiser.step()
    for momentum in {part.momentum for part in found}:
        same = [part for part in found if part.momentum == momentum]
        moments = [tensor for part in same for tensor in part.moments]
        torch._foreach_mul_(moments, momentum)
        torch._foreach_add_(moments, [tensor for part in same for tensor in part.gradients])
    with torch.no_grad():
        for part in found:
            torch._foreach_add_(part.weights, part.moments, alpha=-part.rate)


class _Moving(NamedTuple):
    """What a step of SGD with momentum works on."""

    weights: list[Tensor]
    gradients: list[Tensor]
    moments: list[Tensor]
    momentum: float
    rate: float


def _moving(optimiser: Optimizer) -> _Moving | None:
    """``None`` unless this is all that a step of ``optimiser`` would do."""
    (group, *others), state = optimiser.param_groups, optimiser.state
    if type(optimiser) is not SGD or others or not group["momentum"]:
        return None
    unusual = any(group[name] for name in ("weight_decay", "dampening", "nesterov", "maximize"))
    weights = [weight for weight in group["params"] if weight.grad is not None]
    moments = [state[weight].get("momentum_buffer") for weight in weights if weight in state]
    hooked = optimiser._optimizer_step_pre_hooks or optimiser._optimizer_step_post_hooks
    if unusual or hooked or len(moments) < len(weights) or any(moment is None for moment in moments):
        return None
    return _Moving(weights, [w.grad for w in weights], moments, group["momentum"], group["lr"])


def set_rate(optimiser: Optimizer, rate: float) -> None:
    """Give every parameter group the same learning rate."""
    for group in optimiser.param_groups:
        group["lr"] = rate
