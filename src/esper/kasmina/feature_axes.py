"""Axes of features: which of them seeds get as batch, tokens and width."""

from __future__ import annotations

from typing import Final

from torch import nn

from esper.kasmina.feature_output import Output
from esper.kasmina.probes import Probes
from esper.leyline.errors import HostError

_CHANNELS_FIRST: Final = (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.InstanceNorm1d)
_CHANNELS_LAST: Final = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.RNNBase, nn.MultiheadAttention)


def swapped_axes(probes: Probes, path: str, output: Output) -> tuple[int, int] | None:
    """Return the axes to transpose so that seeds get ``[batch, channels, ...]``, ``[batch, tokens, width]``
    or ``[batch, width]``; None if the features already are in this order.

    The width is the second or the last axis. It does not change with the size of the input. If both axes do
    not change, or the network accepts inputs of one size only, the order follows from the layers.

    Args:
        probes: Forward passes of the network, also with another size of input.
        path: Path of the submodule that returns the features.
        output: Position of the features in the output of the submodule.

    Raises:
        HostError: No axis can be the width.
    """
    last = output.features(probes.by_path[path][0].output).ndim - 1
    by_batch, by_size = probes.varying_axes(path, output)
    fixed = {1, last} - by_batch - by_size
    if not fixed or (last == 1 and 0 not in by_batch and 1 in by_batch):
        raise HostError("no axis of its features keeps its length for inputs of another size")
    if last == 1:
        return None
    if last == 2 and 1 in by_batch and 0 not in by_batch:
        return (0, 1)
    if len(fixed) == 2:
        is_last = _is_width_last(probes.net.get_submodule(path))
        return _order_of_layers(probes, path) if last == 2 else (1, last) if is_last else None
    if last == 2:
        return (1, 2) if fixed == {1} else None
    return None if fixed == {1} else (1, last)


def _order_of_layers(probes: Probes, path: str) -> tuple[int, int] | None:
    """Return the axes to transpose so that features become ``[batch, tokens, width]``; None if they already
    are.

    The order of the axes follows from the nearest layer, at or before ``path``, with a known channel axis.
    """
    net, paths = probes.net, list(probes.by_path)
    for earlier in reversed(paths[: paths.index(path) + 1]):
        module = net.get_submodule(earlier)
        if isinstance(module, _CHANNELS_FIRST):
            return (1, 2)
        if isinstance(module, _CHANNELS_LAST):
            return None
    return None


def _is_width_last(module: nn.Module) -> bool:
    """Return whether the last axis of the module's output is certainly the width; subclasses of torch's
    layers are excluded, because they may transpose."""
    is_last = type(module) in (nn.Linear, nn.Embedding)
    return is_last or (type(module) is nn.LayerNorm and len(module.normalized_shape) == 1)
