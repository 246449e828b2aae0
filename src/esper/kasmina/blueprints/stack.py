"""One more block of the kind that the network is made of: growth in depth by copying.

A copy takes over what its original has learned (Gong et al. 2019, progressive stacking; Du et al. 2024,
G_stack), so unlike every other seed it is not zero at birth.
"""

from torch import Tensor, nn

from esper.kasmina.blueprints.registry import register_blueprint


@register_blueprint("stack", topology="feature_map", copies=True)
@register_blueprint("stack", topology="tokens", copies=True)
@register_blueprint("stack", topology="features", copies=True)
class Stack(nn.Module):
    """block(h) − h: at full alpha the network goes on from block(h), as if built with that block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.block(h)
        return out - h
