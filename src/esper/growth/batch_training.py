"""Training on a user's loader, one epoch at a time: batches, their loss, and optimiser steps.

The last element of a tuple or list batch is the target; the loss is ``loss(net(*inputs), target)``. Any other
batch, a dict for example, is passed to ``loss(net, batch)``. Reading batches leaves the loaders and all
random states unchanged."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import Dataset, IterableDataset

from esper.kasmina.compute import ComputeLedger
from esper.kasmina.contributions import feed
from esper.kasmina.dry_run import CALIBRATION_SAMPLES, batch_norms, fresh_statistics
from esper.kasmina.optimizer_groups import DECAY_SHARE, wsd_factor
from esper.leyline.errors import DataError

if TYPE_CHECKING:
    from esper.growth.growth_events import ProgressLine

Loss = Callable[[Any, Any], Tensor]
Metric = Callable[[Any, Any], Any]
"""Function that is called like the loss and returns one number."""


def check_loader(loader: Iterable[Any], name: str) -> None:
    """Refuse a loader that can be iterated only once. The check of a DataLoader advances the global random
    state, because every new iterator of a DataLoader draws a random number."""
    try:
        once = iter(loader) is loader
    except TypeError:
        raise DataError(
            f"{name} is a {type(loader).__name__}, over which nothing can loop; pass a DataLoader"
        ) from None
    kinds = type(loader).__mro__
    if Tensor in kinds or (Dataset in kinds and IterableDataset not in kinds):
        raise DataError(f"{name} is a {type(loader).__name__}, which holds samples; pass a DataLoader of it")
    if once:
        raise DataError(
            f"{name} is an iterator and would be used up; pass what it was made from, a DataLoader or a list"
            " of batches"
        )


@contextlib.contextmanager
def untouched_streams(*loaders: Iterable[Any]) -> Iterator[None]:
    """Restore the random states of torch, numpy, Python and the loaders on exit."""
    own = [(generator, generator.get_state()) for loader in loaders for generator in generators_of(loader)]
    numpy_state = np.random.get_state()  # noqa: NPY002  data sets of users may draw from numpy's global state
    python_state = random.getstate()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
            for generator, state in own:
                generator.set_state(state)


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators of a DataLoader and its samplers."""
    samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    holders = [loader, *samplers, *(getattr(sampler, "sampler", None) for sampler in samplers)]
    found = [getattr(holder, "generator", None) for holder in holders]
    return [each for each in found if isinstance(each, torch.Generator)]


def endless(loader: Iterable[Any], device: torch.device, name: str) -> Iterator[Any]:
    """Yield the batches of a loader on ``device`` without end, in repeated passes over the loader."""
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield on_device(batch, device)
        if empty:
            raise DataError(f"{name} is empty; at least one batch is needed")


def first_batches(loader: Iterable[Any], device: torch.device, name: str, samples: int) -> list[Any]:
    """Return batches from the start of a loader until they have ``samples`` samples or the loader ends."""
    batches: list[Any] = []
    held = 0
    for batch in loader:
        batches.append(on_device(batch, device))
        held += size_of(batch)
        if held >= samples:
            break
    if not batches:
        raise DataError(f"{name} is empty; at least one batch is needed")
    return batches


def on_device(batch: Any, device: torch.device) -> Any:
    return _mapped(batch, lambda tensor: tensor.to(device))


def size_of(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first tensor."""
    lengths: list[int] = []
    _mapped(batch, lambda tensor: lengths.append(len(tensor)) if tensor.ndim else None)
    return lengths[0] if lengths else 1


def parts_of(batch: Any, count: int) -> list[Any]:
    """Split a batch into at most ``count`` batches of nearly equal size with the same structure."""
    size = size_of(batch)
    count = min(count, size)
    bounds = [size * i // count for i in range(count + 1)]

    def cut(low: int, high: int) -> Any:
        return _mapped(batch, lambda t: t[low:high] if t.ndim and len(t) == size else t)

    return [cut(low, high) for low, high in pairwise(bounds)]


def _mapped(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        mapped = {key: _mapped(value, change) for key, value in tree.items()}
        # A user's mapping whose class cannot be constructed from a dict becomes a plain dict.
        with contextlib.suppress(TypeError):
            return type(tree)(mapped)  # type: ignore[call-arg]
        return mapped
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_mapped(value, change) for value in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(_mapped(value, change) for value in tree)
    return tree


def inputs_of(batch: Any) -> Any:
    """Return the arguments that the network is called with for a batch."""
    return tuple(batch[:-1]) if isinstance(batch, tuple | list) and len(batch) > 1 else batch


def recalibrate(net: nn.Module, batches: Iterable[Any]) -> None:
    """Replace the BatchNorm statistics of ``net``, if it has any, by those of the first training batches."""
    if not batch_norms(net):
        return
    with fresh_statistics(net):
        seen = 0
        for batch in batches:
            seen += feed(net, batch)
            if seen >= CALIBRATION_SAMPLES:
                break


def loss_of(net: nn.Module, batch: Any, loss: Loss) -> Tensor:
    """Return the loss of a batch; raise unless the loss is one number as a tensor."""
    value = _value_of(net, batch, loss, "loss")
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise _not_a_number("loss", "one number as a tensor", value)
    return value.reshape(())


def metric_of(net: nn.Module, batch: Any, metric: Metric) -> float:
    """Return the metric of a batch; raise unless the metric is one number."""
    value = _value_of(net, batch, metric, "metric")
    if not isinstance(value, Tensor | Real) or (isinstance(value, Tensor) and value.numel() != 1):
        raise _not_a_number("metric", "one number", value)
    return float(value)


def _value_of(net: nn.Module, batch: Any, function: Callable[[Any, Any], Any], name: str) -> Any:
    """Call ``function``, a loss or metric called ``name`` in error messages, for a batch."""
    is_pair = isinstance(batch, tuple | list) and len(batch) > 1
    try:
        return function(net(*batch[:-1]), batch[-1]) if is_pair else function(net, batch)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        how = f"{name}(net(*inputs), target)" if is_pair else f"{name}(net, batch)"
        raise DataError(
            f"{how} fails on a batch of {_described(batch)}: {type(error).__name__}: {error}"
        ) from error


def _not_a_number(name: str, wanted: str, value: Any) -> DataError:
    found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    return DataError(
        f"{name} must return {wanted}, and returned {found}; batches (inputs…, target) are used as"
        f" {name}(net(*inputs), target), all others as {name}(net, batch)"
    )


def _described(batch: Any) -> str:
    shapes: list[str] = []
    _mapped(batch, lambda tensor: shapes.append(str(tuple(tensor.shape))))
    return f"shapes {', '.join(shapes)}" if shapes else type(batch).__name__


# --- one epoch ----------------------------------------------------------------------------------------------


@dataclass
class EpochTrainer:
    """Trains a network on a loader. Unless there is a scheduler, the learning rate is constant until the last
    fifth of the training, in which it falls to zero."""

    net: nn.Module
    optimizer: Optimizer
    loss: Loss
    loader: Iterable[Any]
    ledger: ComputeLedger
    epochs: int | None
    """Length of the training in passes over the loader; None if a compute budget is given."""
    budget: float | None
    """Compute budget of the training in FLOPs."""
    scheduler: LRScheduler | None = None
    steps_scheduler: bool = False
    """Whether the scheduler is stepped after every optimiser step; otherwise after every epoch."""
    clip: float | None = None
    """Largest norm of the gradient of an optimiser step; None for no limit."""
    accumulate: int = 1
    """Number of minibatches per optimiser step; the last step of an epoch may have fewer."""
    amp: torch.dtype | None = None
    """Autocast dtype of training steps; None trains without autocast."""
    line: ProgressLine | None = None
    done: int = 0
    """Number of epochs trained so far."""
    steps: int = 0
    """Number of optimiser steps in the current epoch so far."""
    steps_of_epoch: int = 0
    """Number of optimiser steps in the last complete epoch; 0 before the first epoch ends."""

    def __post_init__(self) -> None:
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._device = next(self.net.parameters()).device
        self._scaler = GradScaler(self._device.type, enabled=self.amp is torch.float16)

    @property
    def progress(self) -> float:
        """Fraction of the training that is done, from 0 to 1."""
        return self._progress(self.steps_of_epoch)

    def _progress(self, steps_of_epoch: int) -> float:
        if self.budget is not None:
            return self.ledger.charged / self.budget
        assert self.epochs is not None
        within = self.steps / steps_of_epoch if steps_of_epoch else 0.0
        return (self.done + min(within, 1.0)) / self.epochs

    @property
    def batches_per_epoch(self) -> int:
        """Number of minibatches in an epoch; 0 if the loader has no length."""
        return len(self.loader) if isinstance(self.loader, Sized) else 0

    def train(
        self, sample_flops: float, incubating: int, incubate: Callable[[Callable[[], Tensor]], None]
    ) -> float:
        """Train one epoch and return the mean loss; a non-finite loss ends the epoch and NaN is returned.

        Args:
            sample_flops: Forward FLOPs of one sample.
            incubating: Number of seeds in incubation.
            incubate: Called for every minibatch between backward and step if any seed is incubating; its
                argument is a function that returns the loss of the minibatch.
        """
        self.net.train()
        losses: list[float] = []
        self.steps = 0
        for batches in _groups(self.loader, self.accumulate):
            sizes = list(map(size_of, batches))
            losses += self._step(batches, sizes, incubate if incubating else None)
            if not math.isfinite(losses[-1]):
                self.steps = self.steps_of_epoch = max(self.steps_of_epoch, 1)
                return math.nan
            self.steps += 1
            forward = round(sum(sizes) * sample_flops)
            self.ledger.forward += forward
            self.ledger.backward += 2 * forward
            self.ledger.incubation += 2 * forward * incubating
            self._set_rates()
            if self.line is not None:
                expected = self.steps_of_epoch or math.ceil(self.batches_per_epoch / self.accumulate)
                steps = f"{self.steps} of {expected}" if expected else f"{self.steps}"
                text = f"epoch {self.done + 1}, step {steps}, loss {losses[-1]:.4g}"
                self.line.update(self._progress(expected), text)
            if self.budget is not None and self.ledger.charged >= self.budget:
                break
        if not losses:
            raise DataError("train_loader is empty; at least one batch is needed")
        self.steps_of_epoch = self.steps
        return sum(losses) / len(losses)

    def _step(
        self, batches: list[Any], sizes: list[int], incubate: Callable[[Callable[[], Tensor]], None] | None
    ) -> list[float]:
        """Make one optimiser step on all samples of ``batches`` and return their losses; after a non-finite
        loss, which is the last one returned, no weight changes. ``sizes`` are the numbers of samples.

        Each loss is weighted by the minibatch's share of the samples, so that the gradient is that of the
        mean over all samples.
        """
        losses, shares = [], []
        self.optimizer.zero_grad()
        for batch, size in zip(batches, sizes, strict=True):
            weight = size / sum(sizes)
            share = partial(self._share, on_device(batch, self._device), weight)
            value = share()
            losses.append(float(value.detach()) / weight)
            if not math.isfinite(losses[-1]):
                return losses
            self._scaler.scale(value).backward()
            shares.append(share)
        self._scaler.unscale_(self.optimizer)
        if self.clip is not None:
            # Incubating seeds have no gradient yet, so they do not change the step of the network.
            own = [p for group in self.optimizer.param_groups for p in group["params"]]
            clip_grad_norm_(own, self.clip)
        if incubate is not None:
            for share in shares:
                incubate(share)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        if self.scheduler is not None and self.steps_scheduler:
            self.scheduler.step()
        return losses

    def _share(self, batch: Any, weight: float) -> Tensor:
        """Return the loss of a minibatch, multiplied by ``weight``."""
        with nullcontext() if self.amp is None else torch.autocast(self._device.type, self.amp):
            return loss_of(self.net, batch, self.loss) * weight

    def end_epoch(self, metric: float) -> None:
        """Count one more finished epoch, and step a scheduler of epochs; ``metric`` is read by
        ``ReduceLROnPlateau``."""
        self.done += 1
        self.steps = 0
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(metric)
        elif self.scheduler is not None and not self.steps_scheduler:
            self.scheduler.step()

    def _set_rates(self) -> None:
        progress = self.progress
        if self.scheduler is None and progress >= 1.0 - DECAY_SHARE:
            factor = wsd_factor(progress, minibatch=0, warmup=0)
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = factor * rate

    def state(self) -> dict[str, Any]:
        return {
            "done": self.done,
            "steps_of_epoch": self.steps_of_epoch,
            "scheduler": self.scheduler and self.scheduler.state_dict(),
            "scaler": self._scaler.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.done, self.steps_of_epoch = state["done"], state["steps_of_epoch"]
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])
        self._set_rates()


def _groups(loader: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield the batches of a loader in lists of ``size`` batches; the last list may be shorter."""
    batches = iter(loader)
    while group := list(islice(batches, size)):
        yield group
