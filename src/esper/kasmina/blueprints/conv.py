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
REDUCTION = 4
"""Channels of the slot per channel in the middle."""
ATTENTION_MIN_HIDDEN = 4
BOTTLENECK_MIN_HIDDEN = 8
"""Channels in the middle of a narrow slot's seed, both branches together."""


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


def _branch_hidden(width: int, least: int) -> int:
    """Channels in the middle of one of two branches."""
    return max(least, width // REDUCTION) // 2


@register_blueprint("attention", topology="feature_map")
class ChannelAttention(nn.Module):
    """h·tanh(e(mean of h)): squeeze-and-excitation (Hu et al. 2018) as a residual delta.

    Only what the excitation computes is a pair of branches that cancel, so tanh is zero at birth.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = _branch_hidden(width, ATTENTION_MIN_HIDDEN)
        self.excite = Mirrored(nn.Conv2d(width, hidden, 1), nn.GELU(), nn.Conv2d(hidden, width, 1))

    def forward(self, h: Tensor) -> Tensor:
        return h * torch.tanh(self.excite(h.mean(dim=(2, 3), keepdim=True)))


@register_blueprint("bottleneck", topology="feature_map")
class Bottleneck(Mirrored):
    """1×1 down → 3×3 → GELU → 1×1 up: neighbours and channels for few parameters."""

    def __init__(self, width: int) -> None:
        hidden = _branch_hidden(width, BOTTLENECK_MIN_HIDDEN)
        down, middle = nn.Conv2d(width, hidden, 1), nn.Conv2d(hidden, hidden, 3, padding=1)
        # Of what enters three layers torch's default leaves too little for a gate to learn from.
        nn.init.kaiming_normal_(down.weight, nonlinearity="linear")
        nn.init.kaiming_normal_(middle.weight, nonlinearity="relu")
        super().__init__(down, middle, nn.GELU(), nn.Conv2d(hidden, width, 1))
