"""Blueprints for feature maps ``[batch, channels, height, width]`` and for volumes, with one more spatial
axis.

Volumes have the blueprints ``norm``, ``conv_small`` and ``conv_light``.

Each delta for feature maps is exactly zero at birth, and every weight receives a gradient in the first
backward pass. A delta of one linear layer starts with zero weights; a delta of several layers is the sum of
two branches that cancel (``Mirrored``). No seed ends in a ReLU: at output zero a ReLU passes no gradient, so
the seed would never learn.
"""

from functools import partial

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import Mirrored, register_blueprint

HEAVY_MIN_HIDDEN = 16
"""Smallest total number of hidden channels in the two branches of a ``conv_heavy`` seed."""
REDUCTION = 4
"""Ratio of the slot's channels to the hidden channels of an attention or bottleneck seed."""
ATTENTION_MIN_HIDDEN = 4
BOTTLENECK_MIN_HIDDEN = 8
"""Smallest total number of hidden channels in the two branches of a seed, for blueprints ``attention`` and
``bottleneck``."""


@register_blueprint("norm", topology="feature_map")
class Norm(nn.Module):
    """Seed with delta tanh(s)·(GroupNorm(x) − x); the learned scale s, one per channel, moves features
    towards or away from their normalised values."""

    def __init__(self, width: int, spatial: int = 2) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, width, affine=False)
        self.scale = nn.Parameter(torch.zeros(width, *[1] * spatial))

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.scale) * (self.norm(h) - h)


@register_blueprint("conv_small", topology="feature_map")
class ConvSmall(Mirrored):
    """Seed of 1×1 convolution, GELU and 1×1 convolution, which mixes channels at each position.

    GELU is used, because the few hidden units of a narrow slot could all start inactive with ReLU.
    """

    def __init__(self, width: int, conv: type[nn.Conv2d | nn.Conv3d] = nn.Conv2d) -> None:
        super().__init__(conv(width, width, 1), nn.GELU(), conv(width, width, 1))


@register_blueprint("depthwise", topology="feature_map")
class Depthwise(Mirrored):
    """Seed of a depthwise 3×3 convolution and a 1×1 convolution."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Conv2d(width, width, 3, padding=1, groups=width), nn.Conv2d(width, width, 1))


@register_blueprint("conv_light", topology="feature_map")
class ConvLight(nn.Sequential):
    """Seed of one 3×3 convolution, in volumes 3×3×3."""

    def __init__(self, width: int, conv: type[nn.Conv2d | nn.Conv3d] = nn.Conv2d) -> None:
        layer = conv(width, width, 3, padding=1)
        for weight in layer.parameters():
            nn.init.zeros_(weight)
        super().__init__(layer)


register_blueprint("norm", topology="volume")(partial(Norm, spatial=3))
register_blueprint("conv_small", topology="volume")(partial(ConvSmall, conv=nn.Conv3d))
register_blueprint("conv_light", topology="volume")(partial(ConvLight, conv=nn.Conv3d))


@register_blueprint("conv_heavy", topology="feature_map")
class ConvHeavy(Mirrored):
    """Seed of 3×3 convolution, ReLU and 3×3 convolution."""

    def __init__(self, width: int) -> None:
        hidden = max(HEAVY_MIN_HIDDEN // 2, width)
        super().__init__(
            nn.Conv2d(width, hidden, 3, padding=1), nn.ReLU(), nn.Conv2d(hidden, width, 3, padding=1)
        )


def _branch_hidden(width: int, least: int) -> int:
    """Return the number of hidden channels in each of the two branches of an attention or bottleneck seed."""
    return max(least, width // REDUCTION) // 2


@register_blueprint("attention", topology="feature_map")
class ChannelAttention(nn.Module):
    """Seed with delta h·tanh(e(mean of h)): squeeze-and-excitation (Hu et al. 2018).

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
    """Seed of 1×1 convolution to few channels, 3×3 convolution, GELU, and 1×1 convolution to the slot's
    width."""

    def __init__(self, width: int) -> None:
        hidden = _branch_hidden(width, BOTTLENECK_MIN_HIDDEN)
        down, middle = nn.Conv2d(width, hidden, 1), nn.Conv2d(hidden, hidden, 3, padding=1)
        # With torch's default initialisation the output of the seed would be too small for a gate to receive
        # a gradient.
        nn.init.kaiming_normal_(down.weight, nonlinearity="linear")
        nn.init.kaiming_normal_(middle.weight, nonlinearity="relu")
        super().__init__(down, middle, nn.GELU(), nn.Conv2d(hidden, width, 1))
