"""Blueprint ``widen``, which adds hidden units between two layers of the network: growth in width."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import register_blueprint

SHARE_OF_NEW_UNITS = 0.5
"""Number of new hidden units divided by the number of present hidden units."""


class WidenedLayers(Protocol):
    """Layers between which hidden units are added."""

    first: tuple[nn.Linear | nn.Conv2d, ...]
    """Layers whose outputs are the hidden units; two for a gated MLP."""
    norm: nn.BatchNorm1d | nn.BatchNorm2d | None
    second: nn.Linear | nn.Conv2d
    """Layer that consumes the hidden units."""


@register_blueprint("widen", topology="feature_map", widens=True)
@register_blueprint("widen", topology="tokens", widens=True)
@register_blueprint("widen", topology="features", widens=True)
class NewUnits(nn.Module):
    """Weights of new hidden units; their activation functions are those of the network.

    The incoming weights are normally distributed with the root mean square of the weights of the first layer.
    The outgoing weights are zero, so the output of the network does not change at birth.

    Args:
        layers: Layers of the network between which the units are added.
        count: Number of new units; the share ``SHARE_OF_NEW_UNITS`` of the present units unless given.
    """

    def __init__(self, layers: WidenedLayers, count: int | None = None) -> None:
        super().__init__()
        if count is None:
            count = max(1, int(SHARE_OF_NEW_UNITS * len(layers.first[0].weight)))
        self.inner = nn.ModuleList(_incoming(layer, count) for layer in layers.first)
        self.norm = None if layers.norm is None else _normalisation(layers.norm, count)
        self.outer = _outgoing(layers.second, count)


@torch.no_grad()
def _incoming(layer: nn.Linear | nn.Conv2d, count: int) -> nn.Module:
    has_bias = layer.bias is not None
    new = (
        nn.Linear(layer.in_features, count, bias=has_bias)
        if isinstance(layer, nn.Linear)
        else _convolution(layer, layer.in_channels, count, has_bias=has_bias)
    )
    nn.init.normal_(new.weight, std=_root_mean_square(layer.weight))
    if new.bias is not None:
        nn.init.zeros_(new.bias)
    return new


def _outgoing(layer: nn.Linear | nn.Conv2d, count: int) -> nn.Module:
    new = (
        nn.Linear(count, layer.out_features, bias=False)
        if isinstance(layer, nn.Linear)
        else _convolution(layer, count, layer.out_channels, has_bias=False)
    )
    nn.init.zeros_(new.weight)
    return new


def _convolution(like: nn.Conv2d, before: int, after: int, *, has_bias: bool) -> nn.Conv2d:
    return nn.Conv2d(
        before,
        after,
        like.kernel_size,  # type: ignore[arg-type]  # the stubs of torch declare tuple[int, ...]
        like.stride,  # type: ignore[arg-type]
        like.padding,  # type: ignore[arg-type]
        like.dilation,  # type: ignore[arg-type]
        bias=has_bias,
        padding_mode=like.padding_mode,
    )


def _normalisation(like: nn.BatchNorm1d | nn.BatchNorm2d, count: int) -> nn.Module:
    return type(like)(count, like.eps, like.momentum, like.affine, like.track_running_stats)


def _root_mean_square(weight: Tensor) -> float:
    return float(weight.detach().float().square().mean().sqrt())
