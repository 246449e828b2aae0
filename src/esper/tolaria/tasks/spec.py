"""What a task is: data, a distribution of hosts, a training recipe and a figure of merit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from esper.kasmina.hosts import CNNHost, Host
from esper.leyline.errors import HostError
from esper.leyline.rules import LifecycleRules
from esper.tolaria.data import Splits
from esper.tolaria.objective import CLASSIFICATION, Objective


@dataclass(frozen=True, slots=True)
class InstanceDistribution:
    """Hosts that episodes draw from: each field lists the possible values, one of them is taken."""

    widths: tuple[tuple[int, ...], ...]
    kernels: tuple[int, ...]
    learning_rates: tuple[float, ...] = (0.05,)

    def draw(self, generator: torch.Generator) -> Instance:
        """One instance; a distribution of one point always gives that point."""

        def pick(count: int) -> int:
            return int(torch.randint(count, (), generator=generator))

        return Instance(
            widths=self.widths[pick(len(self.widths))],
            kernel=self.kernels[pick(len(self.kernels))],
            learning_rate=self.learning_rates[pick(len(self.learning_rates))],
        )


@dataclass(frozen=True, slots=True)
class Instance:
    """One drawn host with its training settings."""

    widths: tuple[int, ...]
    kernel: int
    learning_rate: float


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task preset."""

    name: str
    summary: str
    input_shape: tuple[int, int, int]
    classes: int
    load: Callable[[torch.Generator], Splits]
    """Split the data by the given generator."""
    instances: InstanceDistribution
    objective: Objective = CLASSIFICATION
    horizon: int = 20
    batch_size: int = 64
    batches_per_epoch: int = 16
    momentum: float = 0.9
    clip: float = 5.0
    budget_factor: int = 20
    """Parameter budget as a multiple of the host's own parameters; scales an observation only."""
    rules: LifecycleRules = field(
        default_factory=lambda: LifecycleRules(min_training_epochs=2, min_prune_age=3, embargo_epochs=2)
    )

    def __post_init__(self) -> None:
        depths = {len(widths) for widths in self.instances.widths}
        if len(depths) != 1:
            raise HostError(
                f"the hosts of task '{self.name}' must have one number of blocks; found {sorted(depths)}"
            )

    @property
    def num_slots(self) -> int:
        """Slots of every host in the distribution."""
        return len(self.instances.widths[0])

    @property
    def guess_loss(self) -> float:
        """Loss of a blind guess."""
        return math.log(self.classes)

    def build_host(self, instance: Instance) -> Host:
        return CNNHost(
            instance.widths, kernel=instance.kernel, input_shape=self.input_shape, classes=self.classes
        )
