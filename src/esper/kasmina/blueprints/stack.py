"""Blueprint ``stack``, which copies a block of the network: growth in depth.

A ``stack`` seed starts with the trained weights of the copied block (progressive stacking, Gong et al. 2019;
G_stack, Du et al. 2024). Unlike all other seeds, a copied block has a non-zero delta at birth.
"""

from torch import Tensor, nn

from esper.kasmina.blueprints.registry import register_blueprint


@register_blueprint("stack", topology="feature_map", copies=True)
@register_blueprint("stack", topology="volume", copies=True)
@register_blueprint("stack", topology="tokens", copies=True)
@register_blueprint("stack", topology="features", copies=True)
class Stack(nn.Module):
    """Seed with delta block(h) − h: at alpha 1 the features are block(h), as in a network with one more
    block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.block(h)
        return out - h
