"""Batches of a user's loaders: how to read them, and their loss.

The last element of a tuple or list batch is the target; the loss is ``loss(net(*inputs), target)``. Any other
batch, a dict for example, is passed to ``loss(net, batch)``. Reading batches leaves the loaders and all
random states unchanged."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from esper.kasmina.contributions import feed
from esper.kasmina.dry_run import CALIBRATION_SAMPLES, batch_norms, fresh_statistics
from esper.leyline.errors import DataError

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
