"""Blueprints for feature maps ``[batch, channels, height, width]``.

Each ends in a linear layer that starts at zero (or, for NORM, in a scale): the delta is zero at
birth, nothing rectifies it afterwards, so the zero layer learns from the first backward and
everything before it from the second.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import register_blueprint

HEAVY_MIN_HIDDEN = 16


def _zeroed(layer: nn.Conv2d) -> nn.Conv2d:
    """The layer with weight and bias zero: the last one of a delta."""
    nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


@register_blueprint("norm", topology="feature_map")
class Norm(nn.Module):
    """tanh(s)·(GroupNorm(x) − x): moves the features towards normalised ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, width)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.scale) * (self.norm(h) - h)


@register_blueprint("conv_small", topology="feature_map")
class ConvSmall(nn.Sequential):
    """1×1 → ReLU → 1×1: mixes channels, sees no neighbours."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Conv2d(width, 2 * width, 1), nn.ReLU(), _zeroed(nn.Conv2d(2 * width, width, 1)))


@register_blueprint("depthwise", topology="feature_map")
class Depthwise(nn.Sequential):
    """3×3 per channel → 1×1: neighbours and channels, one after the other."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Conv2d(width, width, 3, padding=1, groups=width), _zeroed(nn.Conv2d(width, width, 1))
        )


@register_blueprint("conv_light", topology="feature_map")
class ConvLight(nn.Sequential):
    """One 3×3 convolution."""

    def __init__(self, width: int) -> None:
        super().__init__(_zeroed(nn.Conv2d(width, width, 3, padding=1)))


@register_blueprint("conv_heavy", topology="feature_map")
class ConvHeavy(nn.Sequential):
    """3×3 → ReLU → 3×3 through a wider middle."""

    def __init__(self, width: int) -> None:
        hidden = max(HEAVY_MIN_HIDDEN, 2 * width)
        super().__init__(
            nn.Conv2d(width, hidden, 3, padding=1),
            nn.ReLU(),
            _zeroed(nn.Conv2d(hidden, width, 3, padding=1)),
        )
