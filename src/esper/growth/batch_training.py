"""Batches of a user's loaders: how to read them, their loss, and one epoch of training on them.

The last element of a tuple or list batch is the target; the loss is ``loss(net(*inputs), target)``. Any other
batch, a dict for example, is passed to ``loss(net, batch)``. Reading batches leaves the loaders and all
random states unchanged."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, IterableDataset

from esper.kasmina.compute import ComputeLedger
from esper.kasmina.optimizer_groups import DECAY_SHARE, wsd_factor
from esper.leyline.errors import DataError, EsperError

Loss = Callable[[Any, Any], Tensor]


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


def loss_of(net: nn.Module, batch: Any, loss: Loss) -> Tensor:
    """Return the loss of a batch; raise unless the loss is one number."""
    is_pair = isinstance(batch, tuple | list) and len(batch) > 1
    try:
        value: Any = loss(net(*batch[:-1]), batch[-1]) if is_pair else loss(net, batch)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        how = "loss(net(*inputs), target)" if is_pair else "loss(net, batch)"
        raise DataError(
            f"{how} fails on a batch of {_described(batch)}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = (
            f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        )
        raise DataError(
            f"loss must return one number as a tensor, and returned {found}; batches (inputs…, target) are"
            " used as loss(net(*inputs), target), all others as loss(net, batch)"
        )
    return value.reshape(())


def _described(batch: Any) -> str:
    shapes: list[str] = []
    _mapped(batch, lambda tensor: shapes.append(str(tuple(tensor.shape))))
    return f"shapes {', '.join(shapes)}" if shapes else type(batch).__name__


# --- training -----------------------------------------------------------------------------------------------


@dataclass
class EpochTrainer:
    """Trains a network on a loader; the learning rate is constant until the last fifth of the training, in
    which it falls to zero."""

    net: nn.Module
    optimizer: Optimizer
    loss: Loss
    loader: Iterable[Any]
    ledger: ComputeLedger
    epochs: int | None
    """Length of the training in passes over the loader; None if a compute budget is given."""
    budget: float | None
    """Compute budget of the training in FLOPs."""
    done: int = 0
    """Number of epochs trained so far."""
    steps: int = 0
    """Number of optimiser steps in the current epoch so far."""
    steps_of_epoch: int = 0
    """Number of optimiser steps in the last complete epoch; 0 before the first epoch ends."""

    def __post_init__(self) -> None:
        self._rates = [group["lr"] for group in self.optimizer.param_groups]

    @property
    def progress(self) -> float:
        """Fraction of the training that is done, from 0 to 1."""
        if self.budget is not None:
            return self.ledger.charged / self.budget
        assert self.epochs is not None
        within = self.steps / self.steps_of_epoch if self.steps_of_epoch else 0.0
        return (self.done + min(within, 1.0)) / self.epochs

    def train(
        self, sample_flops: float, incubating: int, incubate: Callable[[Callable[[], Tensor]], None]
    ) -> float:
        """Train one epoch and return the mean loss; a non-finite loss ends the epoch and NaN is returned.

        Args:
            sample_flops: Forward FLOPs of one sample.
            incubating: Number of seeds in incubation.
            incubate: Called for every batch between backward and step if any seed is incubating; its argument
                is a function that returns the loss of the batch.
        """
        net, losses = self.net.train(), []
        device = next(net.parameters()).device
        self.steps = 0
        for batch in self.loader:
            moved = on_device(batch, device)
            value = loss_of(net, moved, self.loss)
            losses.append(float(value.detach()))
            if not math.isfinite(losses[-1]):
                self.steps = self.steps_of_epoch = max(self.steps_of_epoch, 1)
                return math.nan
            self.optimizer.zero_grad()
            value.backward()
            if incubating:
                incubate(partial(loss_of, net, moved, self.loss))
            self.optimizer.step()
            self.steps += 1
            forward = round(size_of(batch) * sample_flops)
            self.ledger.forward += forward
            self.ledger.backward += 2 * forward
            self.ledger.incubation += 2 * forward * incubating
            self._set_rates()
            if self.budget is not None and self.ledger.charged >= self.budget:
                break
        if not losses:
            raise DataError("train_loader is empty; at least one batch is needed")
        self.steps_of_epoch = len(losses)
        return sum(losses) / len(losses)

    def end_epoch(self) -> None:
        """Count one more finished epoch, and set the number of steps of the current epoch to 0."""
        self.done += 1
        self.steps = 0

    def _set_rates(self) -> None:
        if self.progress < 1.0 - DECAY_SHARE:
            return
        factor = wsd_factor(min(self.progress, 1.0), 1, 0)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = factor * rate

    def state(self) -> dict[str, int]:
        return {"done": self.done, "steps_of_epoch": self.steps_of_epoch}

    def load_state(self, state: dict[str, int]) -> None:
        self.done, self.steps_of_epoch = state["done"], state["steps_of_epoch"]
        self._set_rates()


# --- settings -----------------------------------------------------------------------------------------------


def check_length(epochs: Any, budget: Any) -> None:
    """Check that either ``epochs`` or a FLOP ``budget`` is given, and that it is finite and above 0."""
    if (epochs is None) == (budget is None):
        raise EsperError("say how long to train, once: epochs=… or budget=… in FLOPs")
    name, length = ("epochs", epochs) if budget is None else ("budget", budget)
    if not isinstance(length, Real) or not 0 < float(length) < math.inf:
        raise EsperError(f"{name} is {length!r}; it must be a number above 0")


def check_settings(mode: Any, **limits: Any) -> None:
    """Check that ``mode`` is the direction of a metric, and that each of ``limits``, such as ``max_seeds``,
    is None or a non-negative integer."""
    if mode not in ("min", "max"):
        found = "missing" if mode is None else repr(mode)
        raise EsperError(
            f"mode is {found}; pass 'min' if the metric is a loss, 'max' if larger values are better"
        )
    for name, limit in limits.items():
        if limit is not None and not (isinstance(limit, Integral) and int(limit) >= 0):
            raise EsperError(f"{name} is {limit!r}; it must be a whole number, 0 or more")


def check_calibration(batches: Any) -> None:
    """Check the type of the calibration batches, without iterating: a new iterator of a DataLoader draws a
    random number."""
    if batches is not None and (not isinstance(batches, Iterable) or isinstance(batches, Iterator)):
        raise EsperError(
            f"calibrate is a {type(batches).__name__}; pass a DataLoader or a list of training batches, which"
            " can be read every epoch"
        )


def check_alpha(alpha: Any) -> None:
    if not isinstance(alpha, Real) or not 0.0 <= float(alpha) <= 1.0:
        raise EsperError(f"alpha is {alpha!r}; it must be from 0 to 1")
