"""Forward passes on a sample that leave buffers, modes and random state unchanged."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.leyline.errors import HostError


class Call(NamedTuple):
    """One recorded call of a submodule."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


def call(net: nn.Module, sample: Any) -> Any:
    """Call ``net`` with a sample: a tensor, a tuple of arguments, or a dict of named arguments.

    A dict sample whose keys are not arguments of the forward is passed as one argument.
    """
    signature = inspect.signature(net.forward)
    if isinstance(sample, Mapping):
        try:
            signature.bind(**sample)
        except TypeError:
            return net(sample)
        return net(**sample)
    if not isinstance(sample, tuple | list):
        return net(sample)
    try:
        signature.bind(*sample)
    except TypeError as error:
        raise HostError(
            f"the sample has {len(sample)} parts, and {type(net).__name__}.forward{signature} does not take"
            f" them ({error}); pass as sample what the network is called with, without targets"
        ) from None
    return net(*sample)


@contextmanager
def kept_modes(net: nn.Module, training: bool | None = None) -> Iterator[None]:
    """Restore the mode of every submodule on exit; ``training`` is the mode inside the context."""
    modes = [(module, module.training) for module in net.modules()]
    if training is not None:
        net.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def kept_buffers(buffers: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values of ``buffers`` on exit."""
    kept = [(buffer, buffer.clone()) for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


@contextmanager
def untouched(net: nn.Module, training: bool | None = None) -> Iterator[None]:
    """Restore buffers, modes and random state on exit; ``training`` is the mode inside the context."""
    fork = torch.random.fork_rng()
    with kept_buffers(net.buffers()), kept_modes(net, training), fork, warnings.catch_warnings():
        torch.manual_seed(0)
        warnings.simplefilter("ignore")  # Warnings of a forward pass on a sample do not concern the user.
        yield


@contextmanager
def layer_by_layer() -> Iterator[None]:
    """Disable the fused path of torch's transformer layers, which skips hooks and FLOP counters."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def dry_forward(net: nn.Module, sample: Any, *, training: bool = False) -> tuple[list[Call], Any]:
    """Run ``net`` once; return its output, and the calls of its submodules in the order in which the calls
    end.
    """
    calls: list[Call] = []
    handles = []
    for path, module in net.named_modules():
        if path:

            def look(_m: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
                calls.append(Call(path, args, kwargs, output))

            handles.append(module.register_forward_hook(look, with_kwargs=True))
    try:
        with untouched(net, training=training), layer_by_layer(), torch.no_grad():
            result = call(net, sample)
    except HostError:
        raise
    except Exception as error:
        if training:
            raise HostError(
                f"{type(net).__name__} fails on the sample in training mode: {error}. Pass a batch as in"
                " training, of two samples or more"
            ) from error
        raise HostError(
            f"{type(net).__name__} fails on the sample: {type(error).__name__}: {error}. Say with sample= how"
            " it is called: by a tensor, a tuple of arguments or a dict of named ones"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return calls, result


def tensors_in(tree: Any) -> list[Tensor]:
    """Return all tensors in nested tuples, lists, dicts and dataclasses."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [tensor for value in tree.values() for tensor in tensors_in(value)]
    if isinstance(tree, tuple | list):
        return [tensor for value in tree for tensor in tensors_in(value)]
    if dataclasses.is_dataclass(tree):
        return tensors_in([getattr(tree, field.name) for field in dataclasses.fields(tree)])
    return []
