"""Hosts of the scaling tasks that are neither convolutional nor a GPT: residual MLP, small ViT, residual GRU.

Each host is a stem, residual blocks of one width, slots in series, and a head, so that a ``stack`` seed adds
one more block.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.tokens import HEADS, Heads, dense_attention
from esper.kasmina.host import Host
from esper.kasmina.hosts.transformer import Block

PATCH = 7
"""Side length in pixels of a patch, which is one token of a ViT."""


Parts = tuple[Sequence[nn.Module], Callable[[], nn.Module], Sequence[nn.Module]]
"""Layers of the stem, a function that builds a block, and the layers of the head."""


class SeriesHost(Host):
    """Host of a stem, ``blocks`` residual blocks, ``slots`` slots in series, and a head."""

    def __init__(
        self, width: int, *, blocks: int, slots: int, input_shape: tuple[int, ...], classes: int
    ) -> None:
        super().__init__()
        self.spec = {"width": width, "blocks": blocks, "slots": slots}
        self.spec |= {"input_shape": input_shape, "classes": classes}
        stem, block, head = self.parts(width, input_shape, classes)
        trunk = nn.Sequential(*stem, *(block() for _ in range(blocks)))
        between = [nn.Identity() for _ in range(slots - 1)]
        self.segments = nn.ModuleList([trunk, *between, nn.Sequential(*head)])
        with torch.no_grad():
            self.feature_shapes = (tuple(trunk(self.sample_input(1)).shape[1:]),) * slots

    def parts(self, width: int, input_shape: tuple[int, ...], classes: int) -> Parts:
        """Return new parts of a host of the given width."""
        raise NotImplementedError

    def sample_input(self, batch: int) -> Tensor:
        shape = (batch, *self.spec["input_shape"])
        return torch.linspace(-1.0, 1.0, math.prod(shape)).view(shape)


class ResidualLayers(nn.Sequential):
    """Residual block h + f(h), with the layers of f in sequence."""

    def forward(self, h: Tensor) -> Tensor:
        change = h
        for layer in self:
            change = layer(change)
        return h + change


class MLPHost(SeriesHost):
    """Residual MLP for samples of numbers; ``classes`` is the number of its outputs."""

    topology = "features"
    block_kind = ResidualLayers

    def parts(self, width: int, input_shape: tuple[int, ...], classes: int) -> Parts:
        (inputs,) = input_shape

        def block() -> nn.Module:
            layers = (nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            return ResidualLayers(nn.LayerNorm(width), *layers)

        head = _head(width, classes)  # The order in which layers are built sets their initial weights.
        return [nn.Linear(inputs, width)], block, head


def _head(width: int, outputs: int) -> list[nn.Module]:
    return [nn.LayerNorm(width), nn.Linear(width, outputs)]


class Patches(nn.Module):
    """Stem of a ViT: one token for each patch of 7×7 pixels, plus a learned position."""

    def __init__(self, width: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, side = input_shape
        self.project = nn.Conv2d(channels, width, PATCH, stride=PATCH)
        self.position = nn.Parameter(0.02 * torch.randn(height // PATCH * (side // PATCH), width))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x).flatten(2).transpose(1, 2) + self.position


class ViTBlock(Block):
    """Pre-norm transformer block in which every token attends to all tokens."""

    def __init__(self, width: int) -> None:
        super().__init__(width, HEADS, 4 * width, 0.0)
        self.attention.heads = Heads(HEADS, dense_attention, is_causal=False)


class MeanToken(nn.Module):
    """Mean over the tokens."""

    def forward(self, h: Tensor) -> Tensor:
        return h.mean(dim=1)


class ViTHost(SeriesHost):
    """Small vision transformer with patches of 7×7 pixels and four attention heads."""

    topology = "tokens"
    block_kind, is_causal = ViTBlock, False

    def parts(self, width: int, input_shape: tuple[int, ...], classes: int) -> Parts:
        stem = [Patches(width, input_shape)]
        norm, linear = _head(width, classes)
        return stem, lambda: ViTBlock(width), [norm, MeanToken(), linear]


class GRUOutputs(nn.GRU):
    """GRU that returns only the outputs of its steps."""

    def forward(self, h: Tensor) -> Tensor:  # type: ignore[override]  # the state is always new
        outputs: Tensor = super().forward(h)[0]
        return outputs


class GRUHost(SeriesHost):
    """Recurrent language model of residual GRU layers; the outputs are logits of the next token."""

    topology = "tokens"
    block_kind = ResidualLayers

    def parts(self, width: int, input_shape: tuple[int, ...], classes: int) -> Parts:
        def block() -> nn.Module:
            return ResidualLayers(nn.LayerNorm(width), GRUOutputs(width, width, batch_first=True))

        return [nn.Embedding(classes, width)], block, _head(width, classes)

    def sample_input(self, batch: int) -> Tensor:
        (context,) = self.spec["input_shape"]
        return (torch.arange(batch * context) % self.spec["classes"]).view(batch, context)
