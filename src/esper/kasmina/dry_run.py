"""Forward passes that leave buffers, training modes and random state unchanged, and functions that recompute
batch-normalisation statistics or compare outputs before and after a change.

Running statistics from training do not fit a network with a seed switched off: with them the score of that
network would be too low, and the contribution of the seed would be overestimated.
"""

from __future__ import annotations

import dataclasses
import inspect
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from esper.leyline.errors import EsperError, HostError

CALIBRATION_SAMPLES = 512


class Call(NamedTuple):
    """Recorded call of a submodule: path, arguments and output."""

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
    """Restore the training mode of every submodule on exit; ``training`` is the mode inside the context."""
    modes = [(module, module.training) for module in net.modules()]
    try:
        if training is not None:
            net.train(training)
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def kept_buffers(buffers: Iterable[Tensor]) -> Iterator[None]:
    """Restore the present values of ``buffers`` on exit."""
    kept = [(buffer, buffer.clone()) for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


@contextmanager
def untouched(net: nn.Module, training: bool | None = None) -> Iterator[None]:
    """Restore buffers, training modes and random state on exit; ``training`` is the mode inside the
    context."""
    fork = torch.random.fork_rng()
    with warnings.catch_warnings(), fork, kept_buffers(net.buffers()), kept_modes(net, training):
        # torch.manual_seed would also queue a call for accelerators that may be initialised later.
        (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(0)
        warnings.simplefilter("ignore")  # Warnings of this trial run are not shown to users.
        yield


_SWITCHING: Final = threading.RLock()
"""Lock held while fused layers are switched off, which affects all threads."""


@contextmanager
def layer_by_layer() -> Iterator[None]:
    """Disable the fused path of torch's transformer layers, which skips hooks and FLOP counters."""
    with _SWITCHING:
        before = torch.backends.mha.get_fastpath_enabled()
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def exact_float32() -> Iterator[None]:
    """Multiply and convolve float32 tensors on CUDA devices without TF32, which keeps 10 bits of 23."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    exact: tuple[str, Any] = ("fp32_precision", "ieee")
    owners: tuple[Any, ...] = (cuda.matmul, cudnn.conv, cudnn.rnn) if hasattr(cudnn, "conv") else ()
    if not owners:  # Older versions, such as torch 2.8, have no fp32_precision.
        exact, owners = ("allow_tf32", False), (cuda.matmul, cudnn)
    name, wanted = exact
    before = [getattr(owner, name) for owner in owners]
    try:
        for owner in owners:
            setattr(owner, name, wanted)
        yield
    finally:
        for owner, setting in zip(owners, before, strict=True):
            setattr(owner, name, setting)


def dry_forward(
    net: nn.Module, sample: Any, *, training: bool = False, change: Callable[[str, Any], Any] | None = None
) -> tuple[list[Call], Any]:
    """Run ``net`` once; return its output, and the calls of its submodules in the order in which the calls
    end.

    Args:
        net: Network to run.
        sample: Input that the network is called with.
        training: Whether the network runs in training mode.
        change: Function of path and output of a submodule that returns the output to continue with; with such
            a function, the forward pass records a graph of gradients.
    """
    calls: list[Call] = []
    handles = []
    for path, module in net.named_modules():
        if path:

            def look(_m: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> Any:
                changed = output if change is None else change(path, output)
                calls.append(Call(path, args, kwargs, changed))
                return changed

            handles.append(module.register_forward_hook(look, with_kwargs=True))
    try:
        with untouched(net, training=training), layer_by_layer(), torch.set_grad_enabled(change is not None):
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


def call_order(net: nn.Module, sample: Any) -> dict[str, int]:
    """Return the position of every submodule that runs in a forward pass; submodules are ordered by the end
    of their calls.
    """
    calls, _ = dry_forward(net, sample)
    return {path: index for index, path in enumerate(dict.fromkeys(each.path for each in calls))}


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


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the batch-normalisation layers of a model that have running statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


def check_calibration(model: nn.Module, inputs: Tensor | None) -> None:
    """Raise EsperError if the model has batch normalisation and there are no inputs to recompute its
    statistics.
    """
    if inputs is None and (found := batch_norms(model)):
        raise EsperError(
            f"the model has {len(found)} BatchNorm layers, whose statistics do not fit a network with a seed"
            " switched off; pass training inputs as calibration, to make them anew"
        )


@contextmanager
def fresh_statistics(model: nn.Module) -> Iterator[None]:
    """Replace all batch-normalisation statistics by means over the batches that run inside the context;
    dropout is off.
    """
    layers = batch_norms(model)
    momenta = [layer.momentum for layer in layers]
    try:
        with kept_modes(model, training=False), torch.no_grad():
            for layer in layers:
                layer.reset_running_stats()
                # Momentum None makes the running statistics a mean over all batches, not a moving average.
                layer.momentum = None
                layer.train()
            yield
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


def recalibrate(model: nn.Module, inputs: Tensor) -> None:
    """Replace all batch-normalisation statistics by those of ``inputs``."""
    if batch_norms(model):
        with fresh_statistics(model):
            model(inputs[:CALIBRATION_SAMPLES])


def kept_statistics(model: nn.Module) -> AbstractContextManager[None]:
    """Restore the batch-normalisation statistics of the model on exit."""
    return kept_buffers(buffer for layer in batch_norms(model) for buffer in layer.buffers())


# --- comparison of outputs ----------------------------------------------------------------------------------


MERGED_TOLERANCE: Final = (1e-4, 1e-5)
"""Relative and absolute tolerance for outputs if weights were merged, since a merge changes the order of
summation; without a merge, outputs must be bit-equal.
"""

EVAL: Final = "in eval mode"
"""Start of the names of outputs in evaluation mode."""

Outputs = dict[str, list[Tensor]]
"""Outputs of a network by mode, such as ``in eval mode with grad``."""


def outputs_of(net: nn.Module, sample: Any) -> Outputs:
    """Return all tensors that ``net`` returns for the sample: in training and evaluation mode, each with and
    without gradients.
    """
    found: Outputs = {}
    if sample is None:
        return found
    for training in (False, True):
        for grad in (False, True):
            with untouched(net, training=training), torch.set_grad_enabled(grad):
                result = [t.detach().clone() for t in tensors_in(call(net, sample))]
            found[f"in {'train' if training else 'eval'} mode with{'' if grad else 'out'} grad"] = result
    return found


def are_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    """Return whether two lists of tensors are bit-equal; NaN is equal to NaN."""
    return all(
        torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(some, others, strict=True)
    )


def compare(wanted: Outputs, found: Outputs, slot: str, *, exact: bool) -> None:
    """Raise HostError if outputs differ: at all or, unless ``exact``, by more than the tolerance.

    Args:
        wanted: Outputs before the change; ``found`` has the outputs after it.
        found: Outputs in the same modes, and possibly in others.
        slot: Name of the slot in the error message.
        exact: Whether outputs must be bit-equal.
    """
    rtol, atol = (0.0, 0.0) if exact else MERGED_TOLERANCE
    for how, before in wanted.items():
        try:
            torch.testing.assert_close(found[how], before, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            raise HostError(
                f"slot {slot}: the finished network differs {how} from the one that was trained"
                f" ({str(error).splitlines()[0]}); nothing was changed"
            ) from None
