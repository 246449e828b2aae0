"""Runners of a race: seeds in a frozen network, and copies of the network that train without a seed.

All candidates share one frozen network. A control is a copy of the whole network that continues training. All
runners are measured on the same parts of the validation data, so their differences are paired.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from esper.growth.batch_training import Loss, loss_of, parts_of, size_of
from esper.kasmina.contributions import evaluating
from esper.kasmina.graft import Graft
from esper.kasmina.optimizer_groups import check_optimizer
from esper.kasmina.sites import Site
from esper.leyline.errors import HostError

BETAS = (0.9, 0.99)
"""Betas of Adam in a race; second moments decay faster than by default, because a race is short."""
WARM_UP = 0.2
"""Fraction of a race's part in which the learning rate rises; it falls to zero in the rest, so that weights
settle before the measurement.
"""

PEAK = "peak"
"""Key of a parameter group's highest learning rate."""
LEAST_PARTS = 8
"""Smallest number of validation parts for a useful standard error."""


@dataclass
class Limit:
    """Limit of a race in seconds, FLOPs, or both."""

    seconds: float = math.inf
    flops: float = math.inf
    spent: float = 0.0
    """FLOPs used so far."""
    _started: float = field(default_factory=time.monotonic)
    _pace: float = 0.0
    """Seconds per FLOP in the last timed code."""

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    @property
    def left(self) -> float:
        """FLOPs that may still be used, by the limit in seconds and the limit in FLOPs."""
        seconds = self.seconds - self.elapsed
        in_time = seconds / self._pace if self._pace and seconds < math.inf else seconds
        return min(self.flops - self.spent, in_time)

    @contextmanager
    def charged(self, flops: float) -> Iterator[None]:
        """Charge FLOPs for the code inside the context, and time that code."""
        began = time.monotonic()
        yield
        self.charge(flops, time.monotonic() - began)

    def charge(self, flops: float, seconds: float) -> None:
        self.spent += flops
        self._pace = seconds / flops


class Paired(NamedTuple):
    """Mean difference of losses over parts of the validation data, and its standard error."""

    mean: float
    error: float


@dataclass
class Probe:
    """Parts of the validation data on which networks are compared."""

    parts: list[Any]
    loss: Loss

    @classmethod
    def of(cls, batches: Sequence[Any], loss: Loss, parts: int) -> Probe:
        """Split the batches into about ``parts`` parts."""
        each = math.ceil(parts / len(batches))
        return cls([part for batch in batches for part in parts_of(batch, each)], loss)

    def losses(self, net: nn.Module) -> Tensor:
        """Return the loss of every validation part in evaluation mode, shape ``[part]``."""
        with evaluating(net), torch.no_grad():
            return torch.stack([loss_of(net, part, self.loss).double() for part in self.parts]).cpu()

    def shorten(self, samples: float) -> None:
        """Drop validation parts until about ``samples`` samples are left."""
        fits = min(samples / size_of(self.parts[0]), len(self.parts))
        self.parts = self.parts[: max(LEAST_PARTS, int(fits))]

    @property
    def samples(self) -> int:
        return sum(size_of(part) for part in self.parts)

    @property
    def weights(self) -> Tensor:
        """Fraction of all samples in each validation part."""
        sizes = torch.tensor([size_of(part) for part in self.parts], dtype=torch.float64)
        return sizes / sizes.sum()

    def mean(self, losses: Tensor) -> float:
        return float((self.weights * losses).sum())

    def paired(self, losses: Tensor, reference: Tensor) -> Paired:
        """Return the mean of ``losses − reference`` over parts, weighted by the number of samples."""
        difference, count = losses - reference, len(losses)
        mean = self.mean(difference)
        if count < 2:
            return Paired(mean, math.nan)
        variance = float((self.weights**2 * (difference - mean) ** 2).sum()) * count / (count - 1)
        return Paired(mean, math.sqrt(variance))


@contextmanager
def grafted(net: nn.Module, site: Site, graft: Graft) -> Iterator[None]:
    """Add a seed to the forward pass of ``net`` inside the context."""

    def grow(_module: nn.Module, _args: Any, output: Any) -> Any:
        return site.output.replaced(output, graft(site.output.features(output)))

    handle = net.get_submodule(site.path).register_forward_hook(grow)
    try:
        yield
    finally:
        handle.remove()


@dataclass
class Runner:
    """Network in a race with its optimisers; there is no optimiser if no parameter is trainable."""

    net: nn.Module
    optimisers: list[Optimizer]
    site: Site | None = None
    graft: Graft | None = None
    seed_flops: int = 0
    """FLOPs of the seed's forward pass for one sample."""
    steps: int = 0
    losses: Tensor | None = None
    """Losses of the last measurement, one per validation part."""

    @classmethod
    def candidate(cls, host: nn.Module, site: Site, graft: Graft, rate: float, seed_flops: int = 0) -> Runner:
        """Return a runner for a seed in the frozen host that all candidates share."""
        return cls(host, [_adam(graft, rate)], site, graft, seed_flops)

    @classmethod
    def control(cls, net: nn.Module, rate: float) -> Runner:
        """Return a runner for a copy of ``net`` whose trainable parameters are trained by Adam."""
        twin = copy.deepcopy(net).train()
        learns = any(p.requires_grad for p in twin.parameters())
        return cls(twin, [_adam(twin, rate)] if learns else [])

    @classmethod
    def continued(cls, net: nn.Module, optimizer: Optimizer) -> Runner:
        """Return a runner for a copy of ``net`` and of its optimiser, at the schedule's initial learning
        rates.
        """
        check_optimizer(optimizer)
        own = {id(p) for p in net.parameters()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise HostError("the optimizer holds no parameter of the network; pass the one that trains it")
        twin, optimiser = _copied(net, optimizer)
        for group in optimiser.param_groups:
            group[PEAK] = group.get("initial_lr", group["lr"])
        return cls(twin.train(), [optimiser])

    def joined(self, control: Runner) -> Runner:
        """Return a runner for this seed in a copy of ``control``, in which seed and network continue to
        learn.
        """
        net, theirs = _copied(control.net, control.optimisers)
        graft, own = _copied(self.graft, self.optimisers)
        return Runner(net, [*own, *theirs], self.site, graft, self.seed_flops, self.steps)

    def step_flops(self, host: float, *, is_frozen: bool) -> float:
        """Return the FLOPs of training on one sample from the FLOPs of the host's forward pass.

        A backward pass costs two forward passes; through a frozen host it costs one, because no gradients of
        weights are computed.
        """
        return (2 if is_frozen else 3) * host + 3 * self.seed_flops

    @property
    def has_diverged(self) -> bool:
        return self.losses is not None and not bool(torch.isfinite(self.losses).all())

    @contextmanager
    def in_forward(self) -> Iterator[nn.Module]:
        """Yield the network with this runner's seed in it."""
        with ExitStack() as stack:
            if self.site is not None and self.graft is not None:
                stack.enter_context(grafted(self.net, self.site, self.graft))
            yield self.net

    def step(self, batch: Any, loss: Loss, share: float) -> None:
        """Train on a minibatch at ``share`` of the learning rates; a non-finite loss changes no weight."""
        if not self.optimisers:
            return
        for optimiser in self.optimisers:
            optimiser.zero_grad()
            for group in optimiser.param_groups:
                group["lr"] = group[PEAK] * share
        with self.in_forward() as net:
            value = loss_of(net, batch, loss)
            if not bool(torch.isfinite(value)):
                return
            value.backward()
        for optimiser in self.optimisers:
            optimiser.step()
        self.steps += 1

    def measure(self, probe: Probe) -> None:
        """Store the losses of this runner on the validation parts."""
        with self.in_forward() as net, nullcontext() if self.graft is None else evaluating(self.graft):
            self.losses = probe.losses(net)


def _adam(module: nn.Module, rate: float) -> Optimizer:
    parameters = [p for p in module.parameters() if p.requires_grad]
    group = {"params": parameters, PEAK: rate}
    return torch.optim.AdamW([group], lr=rate, betas=BETAS, weight_decay=0.0)


def _copied(module: Any, optimiser: Any) -> Any:
    """Copy network and optimiser together, so that the copied optimiser holds the copied parameters."""
    return copy.deepcopy((module, optimiser))


def frozen(net: nn.Module) -> nn.Module:
    """Return a frozen copy of ``net`` with active dropout and fixed BatchNorm statistics."""
    host = copy.deepcopy(net).train().requires_grad_(False)
    for module in host.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
    return host


def share_of_rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate at a step of a part: it rises linearly, then falls to zero."""
    up = max(1.0, WARM_UP * steps)
    return min((step + 1) / up, (steps - step) / max(1.0, steps - up + 1))


def adopt(control: Runner, net: nn.Module, optimizer: Optimizer) -> None:
    """Load the weights of a control into ``net``; the control's batches are charged to the training."""
    if control.has_diverged:
        return
    net.load_state_dict(control.net.state_dict())
    [theirs] = control.optimisers
    for own, other in zip(_parameters(optimizer), _parameters(theirs), strict=True):
        if other in theirs.state:
            optimizer.state[own] = theirs.state[other]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
