"""Optimisers of seeds: the host's class and settings, an object and a learning-rate clock of their own.

The host's optimiser and scheduler are never touched: adding a parameter group would break or
rescale common schedulers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer


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


def set_rate(optimiser: Optimizer, rate: float) -> None:
    """Give every parameter group the same learning rate."""
    for group in optimiser.param_groups:
        group["lr"] = rate
