"""Runners of a race, the networks that compete: seeds in a frozen network, seeds that train jointly with a
copy of the network, and controls.

Until the last heat all candidates share one frozen network. A control is a copy of the whole network that
continues training without a seed. All networks of a race are measured on the same chunks of the validation
data, so the differences of their losses are paired.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from esper.growth.batch_training import Loss, loss_of, parts_of, size_of
from esper.kasmina.blueprints import Topology
from esper.kasmina.contributions import evaluating
from esper.kasmina.graft import Graft, SideGraft
from esper.kasmina.optimizer_groups import check_optimizer
from esper.kasmina.sites import Site
from esper.kasmina.slot import place_in
from esper.kasmina.transaction import uninterrupted
from esper.kasmina.widening import WidthGraft
from esper.leyline import HostError

Blueprints = Mapping[Topology, Sequence[str]]
"""Blueprints of candidate seeds, by topology."""
CostUnit = Literal["seconds", "flops"]
"""Unit in which the compute of candidates is weighed."""
SEED_RATE = 5e-3
"""Learning rate of Adam for the seed of a candidate."""
BETAS = (0.9, 0.99)
"""Betas of Adam in a race; its second moments decay faster than by default, because a race is short."""
WARM_UP = 0.2
"""Fraction of a heat in which the learning rate rises; in the rest of the heat it falls to zero, so that the
weights settle before the measurement."""
PEAK = "peak"
"""Key under which a parameter group stores its highest learning rate."""
LEAST_PARTS = 8
"""Number of validation chunks below which a standard error would be too inaccurate."""


@dataclass
class Limit:
    """Limit of a race in seconds, in FLOPs, in training steps, or in several of them."""

    seconds: float = math.inf
    flops: float = math.inf
    steps: float = math.inf
    """Largest compute of the race, as a number of training steps of the network."""
    spent: float = 0.0
    """FLOPs that the race has used so far."""
    _started: float = field(default_factory=time.monotonic)
    _pace: float = 0.0
    """Seconds per FLOP of the code that was timed last."""

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    @property
    def left(self) -> float:
        """FLOPs that the race may still use, under its limit in seconds and its limit in FLOPs."""
        seconds = self.seconds - self.elapsed
        in_time = seconds / self._pace if self._pace and seconds < math.inf else seconds
        return min(self.flops - self.spent, in_time)

    def set_step(self, flops: float) -> None:
        """Convert the limit in training steps to FLOPs; a training step costs ``flops``."""
        self.flops = min(self.flops, self.steps * flops)

    @property
    def expected_seconds(self) -> float:
        """Seconds that the race may take: its limit in seconds or, at the present pace, in FLOPs."""
        return min(self.seconds, self.flops * self._pace)

    @contextmanager
    def charged(self, flops: float) -> Iterator[None]:
        """Charge ``flops`` to the limit of the race for the code inside the context, and measure the seconds
        of that code."""
        began = time.monotonic()
        yield
        self.charge(flops, time.monotonic() - began)

    def charge(self, flops: float, seconds: float) -> None:
        self.spent += flops
        self._pace = seconds / flops


class Paired(NamedTuple):
    """Mean difference of two losses over chunks of the validation data, and its standard error."""

    mean: float
    error: float


@dataclass
class Probe:
    """Chunks of the validation data on which networks are compared."""

    parts: list[Any]
    loss: Loss

    @classmethod
    def of(cls, batches: Sequence[Any], loss: Loss, parts: int) -> Probe:
        """Split validation batches into about ``parts`` chunks."""
        each = math.ceil(parts / len(batches))
        return cls([part for batch in batches for part in parts_of(batch, each)], loss)

    def losses(self, net: nn.Module) -> Tensor:
        """Return the loss of ``net`` on every validation chunk, shape ``[chunk]``, in evaluation mode."""
        with evaluating(net), torch.no_grad():
            return torch.stack([loss_of(net, part, self.loss).double() for part in self.parts]).cpu()

    def shorten(self, samples: float) -> None:
        """Drop validation chunks until about ``samples`` samples are left."""
        fits = min(samples / size_of(self.parts[0]), len(self.parts))
        self.parts = self.parts[: max(LEAST_PARTS, int(fits))]

    @property
    def samples(self) -> int:
        return sum(size_of(part) for part in self.parts)

    @property
    def weights(self) -> Tensor:
        """Number of samples in each chunk, divided by the number of samples in all chunks."""
        sizes = torch.tensor([size_of(part) for part in self.parts], dtype=torch.float64)
        return sizes / sizes.sum()

    def mean(self, losses: Tensor) -> float:
        return float((self.weights * losses).sum())

    def paired(self, losses: Tensor, reference: Tensor) -> Paired:
        """Return the mean of ``losses − reference`` over validation chunks, weighted by their number of
        samples."""
        difference, count = losses - reference, len(losses)
        mean = self.mean(difference)
        if count < 2:
            return Paired(mean, math.nan)
        variance = float((self.weights**2 * (difference - mean) ** 2).sum()) * count / (count - 1)
        return Paired(mean, math.sqrt(variance))


@contextmanager
def grafted(net: nn.Module, site: Site, graft: Graft) -> Iterator[None]:
    """Add a seed to the forward pass of ``net`` for the duration of the context."""
    place = place_in(net, site)

    def grow(_module: nn.Module, _args: Any, output: Any) -> Any:
        return site.output.replaced(output, graft(site.output.features(output)))

    is_side = isinstance(graft, SideGraft)
    handle = place.module.register_forward_hook(grow) if is_side else graft.attach(*place)
    try:
        yield
    finally:
        graft.detach(place.container)
        if handle is not None:
            handle.remove()


@dataclass
class Runner:
    """Network that takes part in a race, with its optimisers; the list of optimisers is empty if no parameter
    is trainable."""

    net: nn.Module
    optimisers: list[Optimizer]
    site: Site | None = None
    graft: Graft | None = None
    seed_cost: float = 0.0
    """Cost of the seed's forward pass for one sample, as in ``Candidate.cost``, in FLOPs of the network."""
    steps: int = 0
    losses: Tensor | None = None
    """Validation losses of the last measurement, one per chunk."""

    @classmethod
    def candidate(
        cls, host: nn.Module, site: Site, graft: Graft, rate: float, seed_cost: float = 0.0
    ) -> Runner:
        """Return a runner of a race that trains a seed in the frozen host, which all candidates share."""
        return cls(host, [_adam(graft, rate)], site, graft, seed_cost)

    @classmethod
    def control(cls, net: nn.Module, rate: float) -> Runner:
        """Return a control of a race: a copy of ``net`` whose trainable parameters are trained by Adam."""
        twin = copy.deepcopy(net).train()
        learns = any(p.requires_grad for p in twin.parameters())
        return cls(twin, [_adam(twin, rate)] if learns else [])

    @classmethod
    def continued(cls, net: nn.Module, optimizer: Optimizer) -> Runner:
        """Return a control of a race: copies of ``net`` and ``optimizer``; the copied optimiser has the
        initial learning rates of its schedule.
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
        """Return a runner of a race that trains the seed of this runner jointly with a copy of the network of
        ``control``."""
        net, theirs = _copied(control.net, control.optimisers)
        graft, own = _copied(self.graft, self.optimisers)
        return Runner(net, [*own, *theirs], self.site, graft, self.seed_cost, self.steps)

    def step_flops(self, host: float, *, is_frozen: bool) -> float:
        """Return the FLOPs of a training step per sample; ``host`` is the FLOPs of the host's forward pass.

        A backward pass costs twice as much as a forward pass; through a frozen host it costs as much as a
        forward pass, because no gradients of weights are computed.
        """
        return (2 if is_frozen else 3) * host + 3 * self.seed_cost

    @property
    def has_diverged(self) -> bool:
        return self.losses is not None and not bool(torch.isfinite(self.losses).all())

    @contextmanager
    def in_forward(self) -> Iterator[nn.Module]:
        """Yield the network of this race runner with the runner's seed in its forward pass."""
        with ExitStack() as stack:
            if self.site is not None and self.graft is not None:
                stack.enter_context(grafted(self.net, self.site, self.graft))
            yield self.net

    def step(self, batch: Any, loss: Loss, share: float) -> None:
        """Train on a minibatch at the fraction ``share`` of the highest learning rates; a non-finite loss
        changes no weight."""
        with self.in_forward():
            self.update(batch, loss, share)

    def update(self, batch: Any, loss: Loss, share: float) -> None:
        """Do the same as ``step``, inside the context ``in_forward``."""
        if not self.optimisers:
            return
        for optimiser in self.optimisers:
            optimiser.zero_grad()
            for group in optimiser.param_groups:
                group["lr"] = group[PEAK] * share
        value = loss_of(self.net, batch, loss)
        if not bool(torch.isfinite(value)):
            return
        value.backward()
        for optimiser in self.optimisers:
            optimiser.step()
        self.steps += 1

    def measure(self, probe: Probe) -> None:
        """Store the losses of this race runner on all validation chunks."""
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
    """Return a copy of ``net`` with frozen parameters, active dropout and fixed BatchNorm statistics."""
    host = copy.deepcopy(net).train().requires_grad_(False)
    for module in host.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
    return host


def share_of_rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate at a step of a heat; the factor rises linearly, then falls to
    zero."""
    up = max(1.0, WARM_UP * steps)
    return min((step + 1) / up, (steps - step) / max(1.0, steps - up + 1))


def adopt(control: Runner, net: nn.Module, optimizer: Optimizer) -> None:
    """Load weights and optimiser state of a control into ``net`` and ``optimizer``, unless the control has
    diverged."""
    if control.has_diverged:
        return
    [theirs] = control.optimisers
    pairs = zip(_parameters(optimizer), _parameters(theirs), strict=True)
    state = {own: theirs.state[other] for own, other in pairs if other in theirs.state}
    with uninterrupted():
        net.load_state_dict(control.net.state_dict())
        optimizer.state.update(state)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# --- candidates ---------------------------------------------------------------------------------------------


@dataclass
class Candidate:
    """Candidate of a race: a blueprint at a site, with the FLOPs of its seed and its last measured change of
    the loss."""

    site: Site
    blueprint: str
    graft: Graft
    flops: int
    cost: float
    """Compute that the seed adds to a training step, as a fraction of a step of the network without it: a
    ratio of FLOPs, or of seconds if these were measured."""
    first_order: float = 0.0
    runner: Runner | None = None
    """Network in training with the candidate's seed; None before the candidate starts."""
    change: Paired | None = None
    beyond: Paired | None = None

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.graft.parameters())


def one_per_place_first(ordered: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates in a new order: first the best candidate of every site, then all others."""
    best = {each.site.name: each for each in reversed(ordered)}
    return sorted(ordered, key=lambda each: best[each.site.name] is not each)


def spread(ordered: Sequence[Candidate], count: int) -> list[Candidate]:
    """Return ``count`` evenly spaced elements of a sequence, including the first and, if ``count`` is above
    1, the last element."""
    last = len(ordered) - 1
    return [ordered[round(i * last / max(count - 1, 1))] for i in range(count)]


def score(host: nn.Module, candidates: Sequence[Candidate], data: list[list[Any]], loss: Loss) -> None:
    """Score every candidate by the slope of the validation loss along the training gradient of its new seed.

    One forward pass contains many candidate seeds, because the output of a new seed is exactly zero. Backward
    passes give training gradients g and validation gradients v. The score of a candidate is <g, v> / |g|, for
    its seed.

    Args:
        host: Frozen network in evaluation mode.
        candidates: Candidates; their field ``first_order`` is set.
        data: Training batches and validation batches.
        loss: Loss function.
    """
    for group in scored_together(candidates):
        with ExitStack() as stack:
            for each in group:
                stack.enter_context(grafted(host, each.site, each.graft))
            gradients = [_gradients(host, group, batches, loss) for batches in data]
        for each, g, v in zip(group, *gradients, strict=True):
            each.first_order = float(g @ v / g.norm()) if bool(g.norm() > 0) else 0.0


def scored_together(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Return the candidates in groups that fit into one forward pass.

    A side module must not receive the hidden units that another candidate adds. The hooks of side modules run
    first, if they are registered first, so only side modules between two layers are in conflict.
    """
    wider = [each for each in candidates if isinstance(each.graft, WidthGraft)]
    between = {path for each in wider if each.site.pair for path in each.site.pair.unnormed}
    others = [each for each in candidates if each not in wider]
    inside = [each for each in others if each.site.path in between]
    first = [each for each in others if each not in inside] + wider
    return [group for group in (first, inside) if group]


def _gradients(
    host: nn.Module, group: Sequence[Candidate], batches: Sequence[Any], loss: Loss
) -> list[Tensor]:
    """Return the mean gradient of the seed of every candidate in ``group``, as a flat vector."""
    parameters = [list(each.graft.parameters()) for each in group]
    for each in group:
        each.graft.zero_grad()
    for batch in batches:
        (loss_of(host, batch, loss) / len(batches)).backward()
    return [
        torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in own])
        for own in parameters
    ]
