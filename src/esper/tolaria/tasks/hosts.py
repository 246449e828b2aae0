"""Hosts of the scaling tasks that are neither convolutional nor a GPT: residual MLP, small ViT, residual GRU.

Each host is a stem, residual blocks of one width, slots in series, and a head, so that a ``stack`` seed adds
one more block.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.blueprints import Topology
from esper.kasmina.blueprints.tokens import HEADS, Heads
from esper.kasmina.host import Host
from esper.kasmina.hosts.transformer import Block
from esper.leyline.errors import HostError

PATCH = 7
"""Side length in pixels of a patch, which is one token of a ViT."""


class SeriesHost(Host):
    """Host of a stem, ``blocks`` residual blocks, ``slots`` slots in series, and a head."""

    def __init__(
        self, width: int, *, blocks: int, slots: int, input_shape: tuple[int, ...], classes: int
    ) -> None:
        super().__init__()
        self.spec = {"width": width, "blocks": blocks, "slots": slots}
        if min(self.spec.values()) < 1:
            raise HostError(
                f"a host needs positive width, blocks and slots; found {width}, {blocks}, {slots}"
            )
        self.spec |= {"input_shape": input_shape, "classes": classes}
        stem, block, head = self._parts(width, input_shape, classes)
        between = [nn.Identity() for _ in range(slots - 1)]
        trunk = nn.Sequential(*stem, *(block() for _ in range(blocks)))
        self.segments = nn.ModuleList([trunk, *between, nn.Sequential(*head)])
        with torch.no_grad():
            sample = self.sample_input(1)
            self.feature_shapes = (tuple(trunk(sample).shape[1:]),) * slots

    def _parts(
        self, width: int, input_shape: tuple[int, ...], classes: int
    ) -> tuple[list[nn.Module], Callable[[], nn.Module], list[nn.Module]]:
        """Return the layers of the stem, the function that builds a block, and the layers of the head."""
        raise NotImplementedError

    def sample_input(self, batch: int) -> Tensor:
        return torch.linspace(-1.0, 1.0, steps=batch * _size(self.spec["input_shape"])).view(
            batch, *self.spec["input_shape"]
        )


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


class MLPBlock(nn.Module):
    """Residual block h + f(h); f is LayerNorm, linear layer, ReLU and linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = (nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.change = nn.Sequential(*layers)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.change(h)


class MLPHost(SeriesHost):
    """Residual MLP for samples of numbers; ``classes`` is the number of its outputs."""

    topology: Topology = "features"
    block_kind = MLPBlock

    def _parts(self, width: int, input_shape: tuple[int, ...], classes: int) -> Any:
        head = [nn.LayerNorm(width), nn.Linear(width, classes)]
        return [nn.Linear(*input_shape, width)], lambda: MLPBlock(width), head


class Patches(nn.Module):
    """Stem of a ViT: one token for each patch of 7×7 pixels, plus a learned position."""

    def __init__(self, width: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, side = input_shape
        if height % PATCH or side % PATCH:
            raise HostError(
                f"a ViT needs images whose sides are multiples of {PATCH}; found {height} × {side}"
            )
        self.project = nn.Conv2d(channels, width, PATCH, stride=PATCH)
        self.position = nn.Parameter(0.02 * torch.randn(height // PATCH * (side // PATCH), width))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x).flatten(2).transpose(1, 2) + self.position


class ViTBlock(Block):
    """Pre-norm transformer block in which every token attends to all tokens."""

    def __init__(self, width: int) -> None:
        super().__init__(width, HEADS, 4 * width, 0.0)
        self.attention.heads = Heads(HEADS, F.scaled_dot_product_attention)


class MeanHead(nn.Module):
    """Classifier head: LayerNorm, mean over the tokens, linear layer."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, classes)

    def forward(self, h: Tensor) -> Tensor:
        return self.linear(self.norm(h).mean(dim=1))


class ViTHost(SeriesHost):
    """Small vision transformer with patches of 7×7 pixels and four attention heads."""

    topology: Topology = "tokens"
    block_kind = ViTBlock

    def _parts(self, width: int, input_shape: tuple[int, ...], classes: int) -> Any:
        return [Patches(width, input_shape)], lambda: ViTBlock(width), [MeanHead(width, classes)]


class GRUBlock(nn.Module):
    """Residual block h + GRU(LayerNorm(h))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.gru(self.norm(h))[0]


class GRUHost(SeriesHost):
    """Recurrent language model of residual GRU layers; the outputs are logits of the next token."""

    topology: Topology = "tokens"
    block_kind = GRUBlock

    def _parts(self, width: int, input_shape: tuple[int, ...], classes: int) -> Any:
        stem = [nn.Embedding(classes, width)]
        return stem, lambda: GRUBlock(width), [nn.LayerNorm(width), nn.Linear(width, classes)]

    def sample_input(self, batch: int) -> Tensor:
        (context,) = self.spec["input_shape"]
        return (torch.arange(batch * context) % self.spec["classes"]).view(batch, context)
