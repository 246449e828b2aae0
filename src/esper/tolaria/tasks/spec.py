"""Definition of a task: data, distribution of hosts, training settings, objective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from esper.kasmina.hosts import CNNHost, ResidualHost, TransformerHost
from esper.kasmina.schedules import ScheduleKind
from esper.kasmina.sites import Site
from esper.leyline import HostError, LifecycleRules, SlotConfig
from esper.tolaria.data import Splits
from esper.tolaria.objective import CLASSIFICATION, Objective

T = TypeVar("T")
HostKind = Literal["cnn", "gpt", "residual"]
OptimiserKind = Literal["sgd", "adamw"]
MOMENTUM = 0.9
LEAN = 1
"""Hidden units per unit of width in transformer blocks; the number is small, so that seeds can improve the
host.
"""


@dataclass(frozen=True, slots=True)
class InstanceDistribution:
    """Distribution of task instances: each field lists values, of which an episode draws one uniformly."""

    widths: tuple[tuple[int, ...], ...]
    """Width of every block; all blocks of a transformer have the width of the first."""
    kernels: tuple[int, ...] = (1,)
    learning_rates: tuple[float, ...] = (0.05,)
    rents: tuple[float | None, ...] = (None,)
    """Reward penalty per thousand grown parameters; None uses the setting of the policy training."""
    data_shares: tuple[float, ...] = (1.0,)
    """Shares of the training data that an instance can use."""
    vary_slots: bool = False
    """Whether an instance enables a random non-empty subset of the slots instead of all slots."""
    trunks: tuple[int | None, ...] = (None,)
    """Numbers of blocks before the slots, which are then all in series; None places a slot after each
    block.
    """
    budget_shares: tuple[float, ...] = (1.0,)
    """Shares of the task's compute budget that an instance can have."""

    def draw(self, generator: torch.Generator) -> Instance:
        """Draw one instance of the task."""

        def pick(values: Sequence[T]) -> T:
            return values[int(torch.randint(len(values), (), generator=generator))]

        widths, kernel, learning_rate = pick(self.widths), pick(self.kernels), pick(self.learning_rates)
        # The bits of a random number ≥ 1 select the enabled slots: all non-empty subsets are equally likely.
        subset = pick(range(1, 2 ** len(widths))) if self.vary_slots else -1
        enabled = tuple(bool(subset >> slot & 1) for slot in range(len(widths)))
        rent, data_share, trunk = pick(self.rents), pick(self.data_shares), pick(self.trunks)
        budget_share = pick(self.budget_shares)
        return Instance(widths, kernel, learning_rate, enabled, rent, data_share, trunk, budget_share)


@dataclass(frozen=True, slots=True)
class Instance:
    """Host and training settings of one episode."""

    widths: tuple[int, ...]
    kernel: int
    learning_rate: float
    enabled: tuple[bool, ...]
    """Whether each slot may be used."""
    rent: float | None = None
    data_share: float = 1.0
    trunk: int | None = None
    budget_share: float = 1.0


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """Task preset."""

    name: str
    summary: str
    input_shape: tuple[int, ...]
    """Channels, height and width of an image, or the number of tokens."""
    classes: int
    """Number of classes of the task; for text, the size of the vocabulary."""
    load: Callable[[torch.Generator], Splits]
    """Function that draws the data splits of an episode."""
    digest: Callable[[], str]
    """Function that returns a digest of the whole data set."""
    instances: InstanceDistribution
    objective: Objective = CLASSIFICATION
    host: HostKind = "cnn"
    augment: bool = False
    """Whether the images of every minibatch are randomly shifted and mirrored."""
    horizon: int = 20
    batch_size: int = 64
    batches_per_epoch: int = 16
    budget: int | None = None
    """Compute budget of an episode in FLOPs; None is unlimited. With a compute budget, each step spends 1 /
    ``horizon`` of it, and ``batches_per_epoch`` is not used.
    """
    schedule: ScheduleKind = "cosine"
    warmup: int = 0
    """Number of warmup minibatches of a ``wsd`` schedule."""
    optimiser: OptimiserKind = "sgd"
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    """Argument ``betas`` of AdamW; not used by SGD."""
    feed_forward: int = LEAN
    clip: float = 5.0
    budget_factor: int = 20
    """Parameter budget as a multiple of the host's parameters; it scales an observation and limits
    nothing.
    """
    rules: LifecycleRules = field(
        default_factory=lambda: LifecycleRules(min_training_epochs=2, min_prune_age=3, embargo_epochs=2)
    )

    build: Callable[[], nn.Module] | None = None
    """Function that builds the module of a user's task; a built-in host is used unless given."""
    sites: tuple[Site, ...] = ()
    """Positions of the slots in a user's module."""

    def __post_init__(self) -> None:
        depths = {len(widths) for widths in self.instances.widths}
        if len(depths) != 1:
            raise HostError(
                f"the hosts of task '{self.name}' must have one number of blocks; found {sorted(depths)}"
            )

    @property
    def num_slots(self) -> int:
        """Number of slots of every host."""
        return len(self.instances.widths[0])

    @property
    def slot_config(self) -> SlotConfig:
        """Names of the slots of every host in the distribution."""
        if self.sites:
            return SlotConfig(tuple(site.name for site in self.sites))
        return SlotConfig.of_count(self.num_slots)

    def with_slots(self, count: int) -> TaskSpec:
        """Return the task with hosts of ``count`` blocks; additional blocks have the width of the last
        block.
        """
        if count < 1:
            raise HostError(f"a host needs at least one slot; {count} were asked for")
        if self.sites:
            raise HostError(
                f"the module of task '{self.name}' has the slots {', '.join(self.slot_config.slot_ids)};"
                " their number cannot be changed: name others in the task"
            )
        widths = tuple((w + w[-1:] * count)[:count] for w in self.instances.widths)
        return replace(self, instances=replace(self.instances, widths=widths))

    def until(self, share: float) -> TaskSpec:
        """Return the task with ``share`` of the budget and of the horizon, so that the budget per step is the
        same.
        """
        steps = share * self.horizon
        if self.budget is None or steps != round(steps) or not 0 < share <= 1:
            raise HostError(
                f"task '{self.name}' has no whole number of budgeted steps up to {share:g} of its"
                f" {self.horizon}; choose another share"
            )
        return replace(self, horizon=round(steps), budget=self.budget * round(steps) // self.horizon)

    def budget_of(self, instance: Instance) -> int | None:
        """Return the FLOPs of an episode with this instance; None is unlimited."""
        return None if self.budget is None else round(self.budget * instance.budget_share)

    def with_trunk(self, blocks: int) -> TaskSpec:
        """Return the task with hosts of ``blocks`` blocks before the slots, for baselines without growth."""
        return replace(self, instances=replace(self.instances, trunks=(blocks,)))

    def build_host(self, instance: Instance) -> nn.Module:
        """Return the module of an instance, with initial weights from torch's global generator."""
        if self.build is not None:
            return self.build()
        if self.host == "gpt":
            (context,), (width, *_) = self.input_shape, instance.widths
            slots = len(instance.widths)
            return TransformerHost(
                vocabulary=self.classes,
                context=context,
                width=width,
                layers=instance.trunk or slots,
                slots_after=None if instance.trunk is None else [instance.trunk - 1] * slots,
                feed_forward=self.feed_forward,
            )
        channels, height, side = self.input_shape
        if self.host == "residual":
            return ResidualHost(
                instance.widths[0],
                blocks=instance.trunk or 1,
                slots=len(instance.widths),
                input_shape=(channels, height, side),
                classes=self.classes,
            )
        return CNNHost(
            instance.widths,
            kernel=instance.kernel,
            input_shape=(channels, height, side),
            classes=self.classes,
        )

    def build_optimiser(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> Optimizer:
        """Return the optimiser of the host; seeds join it with parameter groups."""
        if self.optimiser == "adamw":
            return AdamW(
                parameters, lr=learning_rate, betas=self.betas, weight_decay=self.weight_decay, foreach=True
            )
        return SGD(parameters, lr=learning_rate, momentum=MOMENTUM, foreach=True)


def scaling_study(task: TaskSpec, *, budget: int) -> TaskSpec:
    """Return the task with a budget in FLOPs and the training settings of scaling studies.

    The returned task uses a warmup-stable-decay schedule, and seeds skip incubation.
    """
    return replace(
        task,
        budget=budget,
        horizon=160,
        batch_size=16,
        optimiser="adamw",
        betas=(0.9, 0.98),
        weight_decay=0.05,
        clip=1.0,
        schedule="wsd",
        warmup=60,
        rules=LifecycleRules(min_training_epochs=0, enters_at_once=True, min_prune_age=3, embargo_epochs=2),
    )
