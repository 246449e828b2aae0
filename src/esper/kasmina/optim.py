"""Optimisers of seeds and learning-rate schedules.

A seed's optimiser has the host's class and settings, and is an object of its own.

The host's optimiser and scheduler are never touched: adding a parameter group would break or
rescale common schedulers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

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
            target.state[ours] = {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in source.state[theirs].items()
            }


def set_rate(optimiser: Optimizer, rate: float) -> None:
    """Give every parameter group the same learning rate."""
    for group in optimiser.param_groups:
        group["lr"] = rate
