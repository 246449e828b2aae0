"""Blueprints for feature maps ``[batch, channels, height, width]`` that work through a few channels.

They stand beside the convolutions of ``conv.py`` and keep the same contract: exactly zero at birth,
and alive with every weight from the first backward.
"""

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.mirror import Mirrored
from esper.kasmina.blueprints.registry import register_blueprint

REDUCTION = 4
"""Channels of the slot per channel in the middle."""
ATTENTION_MIN_HIDDEN = 4
BOTTLENECK_MIN_HIDDEN = 8
"""Channels in the middle of a narrow slot's seed, both branches together."""


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
