"""Blueprints for feature maps ``[batch, channels, height, width]``.

Each is exactly zero at birth and learns with all its weights from the first backward: what has one
linear layer starts with it at zero, what has two starts as a pair of branches that cancel. Nothing
rectifies the delta, which would hold it at zero for ever.
"""

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.mirror import Mirrored
from esper.kasmina.blueprints.registry import register_blueprint

HEAVY_MIN_HIDDEN = 16
"""Hidden channels of CONV_HEAVY in a narrow slot, both branches together."""


@register_blueprint("norm", topology="feature_map")
class Norm(nn.Module):
    """tanh(s)·(GroupNorm(x) − x): moves each channel towards its normalised self, or away."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, width, affine=False)
        self.scale = nn.Parameter(torch.zeros(width, 1, 1))

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.scale) * (self.norm(h) - h)


@register_blueprint("conv_small", topology="feature_map")
class ConvSmall(Mirrored):
    """1×1 → GELU → 1×1: mixes channels, sees no neighbours.

    Not a ReLU: the few hidden units of a narrow slot may all start on its dead side.
    """

    def __init__(self, width: int) -> None:
        super().__init__(nn.Conv2d(width, width, 1), nn.GELU(), nn.Conv2d(width, width, 1))


@register_blueprint("depthwise", topology="feature_map")
class Depthwise(Mirrored):
    """3×3 per channel → 1×1: neighbours and channels, one after the other."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Conv2d(width, width, 3, padding=1, groups=width), nn.Conv2d(width, width, 1))


@register_blueprint("conv_light", topology="feature_map")
class ConvLight(nn.Sequential):
    """One 3×3 convolution."""

    def __init__(self, width: int) -> None:
        layer = nn.Conv2d(width, width, 3, padding=1)
        for weight in layer.parameters():
            nn.init.zeros_(weight)
        super().__init__(layer)


@register_blueprint("conv_heavy", topology="feature_map")
class ConvHeavy(Mirrored):
    """3×3 → ReLU → 3×3 through a wider middle."""

    def __init__(self, width: int) -> None:
        hidden = max(HEAVY_MIN_HIDDEN // 2, width)
        super().__init__(
            nn.Conv2d(width, hidden, 3, padding=1), nn.ReLU(), nn.Conv2d(hidden, width, 3, padding=1)
        )
