"""Definition of a task: data, distribution of hosts, training settings, and objective (the loss that training
minimises, and the score by which networks are compared).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from esper.kasmina.hosts import CNNHost, ResidualHost, TransformerHost
from esper.kasmina.optimizer_groups import ScheduleKind
from esper.kasmina.sites import Site
from esper.leyline import HostError, LifecycleRules, SlotConfig
from esper.tolaria.data import Splits
from esper.tolaria.tasks.hosts import GRUHost, MLPHost, ViTHost

T = TypeVar("T")
SERIES_HOSTS: dict[str, Callable[..., nn.Module]] = {
    "residual": ResidualHost,
    "mlp": MLPHost,
    "vit": ViTHost,
    "gru": GRUHost,
}
"""Hosts of one width with slots in series behind a trunk of blocks, by kind."""
HostKind = Literal["cnn", "gpt", "residual", "mlp", "vit", "gru"]
OptimiserKind = Literal["sgd", "adamw"]
MOMENTUM = 0.9
RULES = LifecycleRules(min_training_epochs=2, min_prune_age=3, embargo_epochs=2)
LEAN = 1
"""Hidden units of a transformer block's MLP per unit of width; small, so that seeds can improve the host."""

# --- objectives -------------------------------------------------------------------------------------

Measure = Callable[[Tensor, Tensor], Tensor]
"""Function of ``output`` and ``target`` that returns a loss or score, as a mean or for each sample."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Loss and score of one kind of task, such as classification."""

    loss: Measure
    """Function that returns the mean loss of a batch."""
    sample_losses: Measure
    """Function that returns the loss of every sample, ``[sample]``."""
    sample_scores: Measure
    """Function that returns the score of every sample, ``[sample]``, from 0 to 100; higher is better."""


def _sample_losses(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


def _sample_scores(output: Tensor, target: Tensor) -> Tensor:
    return 100.0 * (output.argmax(dim=-1) == target).float()


CLASSIFICATION = Objective(F.cross_entropy, _sample_losses, _sample_scores)
"""Objective of classification: cross entropy as loss, and a score of 100 for the right class, else 0."""


def regression(targets: Tensor) -> Objective:
    """Return the objective of regression, with the squared error as loss.

    The score of a sample is 100·(1 − squared error / variance of ``targets``), at least 0.
    """
    variance = (targets - targets.mean(dim=0)).square().mean()

    def losses(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().flatten(1).mean(dim=1)

    def scores(output: Tensor, target: Tensor) -> Tensor:
        return 100.0 * (1.0 - losses(output, target) / variance).clamp(min=0.0)

    return Objective(F.mse_loss, losses, scores)


def _by_token(measure: Measure) -> Measure:
    """Return a function that computes ``measure`` for every token, and its mean for each sample."""

    def of_samples(output: Tensor, target: Tensor) -> Tensor:
        return measure(output.flatten(0, 1), target.flatten()).view(target.shape).mean(dim=1)

    return of_samples


def _token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


NEXT_TOKEN = Objective(_token_loss, _by_token(_sample_losses), _by_token(_sample_scores))
"""Objective of text: cross entropy of the next token as loss, and the percentage of right tokens as score."""

# --- tasks ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Instance:
    """Instance of a task: host and training settings of one episode."""

    widths: tuple[int, ...]
    kernel: int
    learning_rate: float
    enabled: tuple[bool, ...]
    """Whether each slot may hold a seed."""
    rent: float | None = None
    data_share: float = 1.0
    trunk: int | None = None
    budget_share: float = 1.0
    batch_size: int | None = None
    """Samples of a minibatch; None stands for the batch size of the task."""


@dataclass(frozen=True, slots=True)
class InstanceDistribution:
    """Distribution of task instances: for each field an episode draws one of the listed values."""

    widths: tuple[tuple[int, ...], ...]
    """Alternative tuples with the widths of all blocks; a transformer uses only the width of the first
    block."""
    kernels: tuple[int, ...] = (1,)
    learning_rates: tuple[float, ...] = (0.05,)
    rents: tuple[float | None, ...] = (None,)
    """Rent per thousand grown parameters; None stands for the rent in the policy training's settings."""
    data_shares: tuple[float, ...] = (1.0,)
    """Shares of the training samples that an instance of the task can use."""
    vary_slots: bool = False
    """Whether an instance of the task enables a random non-empty subset of the slots instead of all slots."""
    trunks: tuple[int | None, ...] = (None,)
    """Numbers of blocks before the first slot, with all slots in series; None puts a slot after each block
    instead."""
    budget_shares: tuple[float, ...] = (1.0,)
    """Shares of the task's compute budget that an instance of the task can have."""
    batch_sizes: tuple[int | None, ...] = (None,)
    """Samples of a minibatch; None stands for the batch size of the task."""

    def draw(self, generator: torch.Generator) -> Instance:
        """Draw one instance of the task with ``generator``."""

        def pick(values: Sequence[T]) -> T:
            return values[int(torch.randint(len(values), (), generator=generator))]

        widths, kernel, learning_rate = pick(self.widths), pick(self.kernels), pick(self.learning_rates)
        # The bits of a random number ≥ 1 select the enabled slots, so all non-empty subsets are equally
        # likely.
        subset = pick(range(1, 2 ** len(widths))) if self.vary_slots else -1
        enabled = tuple(bool(subset >> slot & 1) for slot in range(len(widths)))
        rent, data_share, trunk = pick(self.rents), pick(self.data_shares), pick(self.trunks)
        others = pick(self.budget_shares), pick(self.batch_sizes)
        return Instance(widths, kernel, learning_rate, enabled, rent, data_share, trunk, *others)


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """Task: data, hosts, training settings and objective."""

    name: str
    summary: str
    input_shape: tuple[int, ...]
    """Channels, height and width of an image, or the number of tokens."""
    classes: int
    """Number of classes of the task; for text, the size of the vocabulary."""
    load: Callable[[torch.Generator], Splits]
    """Function that draws the data splits of an episode."""
    digest: Callable[[], str]
    """Function that returns a digest of the whole data set, as text."""
    instances: InstanceDistribution
    objective: Objective = CLASSIFICATION
    host: HostKind = "cnn"
    augment: bool = False
    """Whether the images of every minibatch are randomly shifted and mirrored."""
    horizon: int = 20
    batch_size: int = 64
    batches_per_epoch: int = 16
    budget: int | None = None
    """Compute budget of an episode in FLOPs; None means that compute is unlimited.

    With a compute budget, each step spends 1 / ``horizon`` of it, and ``batches_per_epoch`` is not used.
    """
    schedule: ScheduleKind = "cosine"
    warmup: int = 0
    """Number of warmup minibatches of a ``wsd`` (warmup-stable-decay) schedule."""
    optimiser: OptimiserKind = "sgd"
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    """Weight decay of AdamW; SGD uses neither ``betas`` nor ``weight_decay``."""
    feed_forward: int = LEAN
    clip: float = 5.0
    budget_factor: int = 20
    """Parameter count at which the parameter feature of an observation is 1, as a multiple of the host's
    parameter count; not a limit of growth."""
    rules: LifecycleRules = RULES

    build: Callable[[], nn.Module] | None = None
    """Function that builds the host of a user's task; without it a built-in host is used."""
    sites: tuple[Site, ...] = ()
    """Sites of the slots in a user's module."""
    held_out: bool = False
    """Whether the task is kept for one final evaluation: nothing may be tuned on it."""

    def __post_init__(self) -> None:
        depths = {len(widths) for widths in self.instances.widths}
        if len(depths) != 1:
            raise HostError(
                f"the hosts of task '{self.name}' must have one number of blocks; found {sorted(depths)}"
            )

    @property
    def num_slots(self) -> int:
        """Number of slots of every host of the task."""
        return len(self.instances.widths[0])

    @property
    def slot_config(self) -> SlotConfig:
        """Names of the slots of every host of the task."""
        if self.sites:
            return SlotConfig(tuple(site.name for site in self.sites))
        return SlotConfig.of_count(self.num_slots)

    def with_slots(self, count: int) -> Self:
        """Return the task with hosts of ``count`` slots; blocks that are added repeat the last width."""
        if count < 1:
            raise HostError(f"a host needs at least one slot; {count} were asked for")
        if self.sites:
            raise HostError(
                f"the module of task '{self.name}' has the slots {', '.join(self.slot_config.slot_ids)};"
                " their number cannot be changed: name others in the task"
            )
        widths = tuple((w + w[-1:] * count)[:count] for w in self.instances.widths)
        return replace(self, instances=replace(self.instances, widths=widths))

    def until(self, share: float) -> Self:
        """Return the task with a ``share`` of its horizon and of its budget; budget per step is unchanged."""
        steps = share * self.horizon
        if self.budget is None or steps != round(steps) or not 0 < share <= 1:
            raise HostError(
                f"task '{self.name}' has no whole number of budgeted steps up to {share:g} of its"
                f" {self.horizon}; choose another share"
            )
        return replace(self, horizon=round(steps), budget=self.budget * round(steps) // self.horizon)

    def budget_of(self, instance: Instance) -> int | None:
        """Return the compute budget in FLOPs of an episode with ``instance``; None means unlimited."""
        return None if self.budget is None else round(self.budget * instance.budget_share)

    def with_trunk(self, blocks: int) -> Self:
        """Return the task with ``blocks`` blocks before the first slot, for baselines without growth."""
        return replace(self, instances=replace(self.instances, trunks=(blocks,)))

    def with_instance(
        self,
        *,
        width: int | None = None,
        learning_rate: float | None = None,
        batch_size: int | None = None,
        data_share: float | None = None,
        budget: int | None = None,
    ) -> Self:
        """Return the task with instances of the given properties; all others are as before.

        Args:
            width: Width of all blocks.
            learning_rate: Learning rate of host and seeds.
            batch_size: Samples of a minibatch.
            data_share: Share of the training samples that can be used.
            budget: Compute budget in FLOPs.

        Raises:
            HostError: A property is not positive, or ``data_share`` is above 1.

        Example:
            >>> task_named("pycode_scaling").with_instance(width=48, learning_rate=2e-3, data_share=0.25)
        """
        given: dict[str, Any] = {"width": width, "learning_rate": learning_rate, "batch_size": batch_size}
        given |= {"data_share": data_share, "budget": budget}
        known = {name: value for name, value in given.items() if value is not None}
        for name, value in known.items():
            if not value > 0 or (name == "data_share" and value > 1):
                raise HostError(
                    f"{name} of an instance of '{self.name}' is {value}; give a positive number, and at most"
                    " 1 as data_share"
                )
        budget = known.pop("budget", self.budget)
        values: dict[str, Any] = {f"{name}s": (value,) for name, value in known.items()}
        if width is not None:
            values["widths"] = ((width,) * self.num_slots,)
        return replace(self, instances=replace(self.instances, **values), budget=budget)

    def build_host(self, instance: Instance) -> nn.Module:
        """Return the host of ``instance``, with initial weights from torch's global generator."""
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
        if self.host in SERIES_HOSTS:
            return SERIES_HOSTS[self.host](
                instance.widths[0],
                blocks=instance.trunk or 1,
                slots=len(instance.widths),
                input_shape=self.input_shape,
                classes=self.classes,
            )
        channels, height, side = self.input_shape
        image = (channels, height, side)
        return CNNHost(instance.widths, kernel=instance.kernel, input_shape=image, classes=self.classes)

    def build_optimiser(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> Optimizer:
        """Return the optimiser of the host, to which a parameter group is added for every seed."""
        if self.optimiser == "adamw":
            return AdamW(
                parameters, lr=learning_rate, betas=self.betas, weight_decay=self.weight_decay, foreach=True
            )
        return SGD(parameters, lr=learning_rate, momentum=MOMENTUM, foreach=True)


def scaling_study(task: TaskSpec, *, budget: int, batch_size: int = 16) -> TaskSpec:
    """Return the task with a budget in FLOPs and the training settings of scaling studies.

    The returned task uses a warmup-stable-decay schedule, and seeds skip incubation.
    """
    return replace(
        task,
        budget=budget,
        horizon=160,
        batch_size=batch_size,
        optimiser="adamw",
        betas=(0.9, 0.98),
        weight_decay=0.05,
        clip=1.0,
        schedule="wsd",
        warmup=60,
        rules=LifecycleRules(min_training_epochs=0, enters_at_once=True, min_prune_age=3, embargo_epochs=2),
    )
