"""Blueprints for feature maps ``[batch, channels, height, width]``.

Each delta is exactly zero at birth, and every weight receives a gradient in the first backward pass. A single
linear layer starts at zero; several layers are two branches that cancel (``Mirrored``). No delta ends in a
ReLU, through which a delta of zero would receive no gradient.
"""

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.mirror import Mirrored
from esper.kasmina.blueprints.registry import register_blueprint

HEAVY_MIN_HIDDEN = 16
"""Smallest number of hidden channels of CONV_HEAVY, both branches together."""
REDUCTION = 4
"""Number of the slot's channels per hidden channel."""
ATTENTION_MIN_HIDDEN = 4
BOTTLENECK_MIN_HIDDEN = 8
"""Smallest numbers of hidden channels by blueprint, both branches together."""


@register_blueprint("norm", topology="feature_map")
class Norm(nn.Module):
    """Delta tanh(s)·(GroupNorm(x) − x): moves each channel towards its normalised value or away from it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, width, affine=False)
        self.scale = nn.Parameter(torch.zeros(width, 1, 1))

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.scale) * (self.norm(h) - h)


@register_blueprint("conv_small", topology="feature_map")
class ConvSmall(Mirrored):
    """1×1 convolution, GELU, 1×1 convolution: mixes channels at each position.

    ReLU is not used: the few hidden units of a narrow slot could all start inactive.
    """

    def __init__(self, width: int) -> None:
        super().__init__(nn.Conv2d(width, width, 1), nn.GELU(), nn.Conv2d(width, width, 1))


@register_blueprint("depthwise", topology="feature_map")
class Depthwise(Mirrored):
    """Depthwise 3×3 convolution, then a 1×1 convolution."""

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
    """3×3 convolution, ReLU, 3×3 convolution."""

    def __init__(self, width: int) -> None:
        hidden = max(HEAVY_MIN_HIDDEN // 2, width)
        super().__init__(
            nn.Conv2d(width, hidden, 3, padding=1), nn.ReLU(), nn.Conv2d(hidden, width, 3, padding=1)
        )


def _branch_hidden(width: int, least: int) -> int:
    """Return the number of hidden channels of one of the two branches."""
    return max(least, width // REDUCTION) // 2


@register_blueprint("attention", topology="feature_map")
class ChannelAttention(nn.Module):
    """Delta h·tanh(e(mean of h)): squeeze-and-excitation (Hu et al. 2018).

    The excitation e consists of two branches that cancel, so that tanh is zero at birth.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = _branch_hidden(width, ATTENTION_MIN_HIDDEN)
        self.excite = Mirrored(nn.Conv2d(width, hidden, 1), nn.GELU(), nn.Conv2d(hidden, width, 1))

    def forward(self, h: Tensor) -> Tensor:
        return h * torch.tanh(self.excite(h.mean(dim=(2, 3), keepdim=True)))


@register_blueprint("bottleneck", topology="feature_map")
class Bottleneck(Mirrored):
    """1×1 convolution to few channels, 3×3 convolution, GELU, 1×1 convolution to the slot's width."""

    def __init__(self, width: int) -> None:
        hidden = _branch_hidden(width, BOTTLENECK_MIN_HIDDEN)
        down, middle = nn.Conv2d(width, hidden, 1), nn.Conv2d(hidden, hidden, 3, padding=1)
        # With torch's default initialisation the output of three layers is too small for a gate to receive a
        # gradient.
        nn.init.kaiming_normal_(down.weight, nonlinearity="linear")
        nn.init.kaiming_normal_(middle.weight, nonlinearity="relu")
        super().__init__(down, middle, nn.GELU(), nn.Conv2d(hidden, width, 1))
