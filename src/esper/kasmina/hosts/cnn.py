"""Small convolutional hosts: GroupNorm throughout, memory format ``channels_last``."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import Topology
from esper.kasmina.host import Host
from esper.leyline.errors import HostError

CHANNELS_PER_GROUP = 8
SMALLEST_POOLED = 4
"""Side length of a feature map below which a block does not pool."""


class GlobalHead(nn.Module):
    """Classifier head: mean over the positions, then a linear layer."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, classes)

    def forward(self, h: Tensor) -> Tensor:
        # Permuting ``h`` first gives its gradient the memory format channels_last, which ``h`` has, too.
        return self.linear(h.permute(0, 2, 3, 1).flatten(1, 2).mean(dim=1))


def _conv_block(channels: int, width: int, kernel: int, *, pools: bool) -> nn.Sequential:
    """Return a block of convolution, GroupNorm and ReLU, preceded by a 2×2 max pooling if ``pools`` is
    True."""
    pool = [nn.MaxPool2d(2)] if pools else []
    convolution = _convolution(channels, width, kernel)
    return nn.Sequential(*pool, convolution, nn.GroupNorm(_groups(width), width), nn.ReLU(inplace=True))


class _ImageHost(Host):
    topology: Topology = "feature_map"
    channels_last = True

    def sample_input(self, batch: int) -> Tensor:
        shape = (batch, *self.spec["input_shape"])
        return torch.linspace(-1.0, 1.0, math.prod(shape)).view(shape)


class CNNHost(_ImageHost):
    """CNN of blocks of convolution, GroupNorm and ReLU, with a slot after each block; blocks after the first
    start with pooling while the feature map is large enough.
    """

    def __init__(
        self, widths: Sequence[int], *, kernel: int, input_shape: tuple[int, int, int], classes: int
    ) -> None:
        super().__init__()
        if not widths or min(widths) < 1:
            raise HostError(f"a CNN host needs positive block widths; found {tuple(widths)}")
        if kernel < 1 or kernel % 2 == 0:
            raise HostError(f"the kernel of a CNN host must be odd, to keep the size; found {kernel}")
        self.spec = {"widths": list(widths), "kernel": kernel, "input_shape": input_shape, "classes": classes}
        self.segments = nn.ModuleList()
        channels, height, side = input_shape
        shapes = []
        for index, width in enumerate(widths):
            pooled = index > 0 and min(height, side) >= SMALLEST_POOLED
            if pooled:
                height, side = height // 2, side // 2
            self.segments.append(_conv_block(channels, width, kernel, pools=pooled))
            shapes.append((width, height, side))
            channels = width
        self.feature_shapes = tuple(shapes)
        self.segments.append(GlobalHead(channels, classes))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stubs


class ResidualBlock(nn.Module):
    """Residual block h + f(h); f is GroupNorm, ReLU and 3×3 convolution, twice (He et al. 2016,
    pre-activation).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.change = nn.Sequential(*_normalised_conv(width), *_normalised_conv(width))

    def reset_parameters(self) -> None:
        """Give all layers initial values, drawn as by the constructor."""
        for layer in self.change:
            if isinstance(layer, nn.GroupNorm):
                layer.reset_parameters()
            elif isinstance(layer, nn.Conv2d):
                _initialise(layer)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.change(h)


def _normalised_conv(width: int) -> list[nn.Module]:
    return [nn.GroupNorm(_groups(width), width), nn.ReLU(inplace=True), _convolution(width, width, 3)]


class ResidualHost(_ImageHost):
    """Residual network: a stem, ``blocks`` residual blocks of one width, ``slots`` slots in series, and a
    classifier.
    """

    block_kind = ResidualBlock

    def __init__(
        self, width: int, *, blocks: int, slots: int, input_shape: tuple[int, int, int], classes: int
    ) -> None:
        super().__init__()
        if min(width, blocks, slots) < 1:
            raise HostError(
                f"a residual host needs positive width, blocks and slots; found {width}, {blocks}, {slots}"
            )
        self.spec = {"width": width, "blocks": blocks, "slots": slots}
        self.spec |= {"input_shape": input_shape, "classes": classes}
        channels, height, side = input_shape
        self.feature_shapes = ((width, height // 2, side // 2),) * slots
        stem = [_convolution(channels, width, 3), nn.AvgPool2d(2)]
        trunk = [ResidualBlock(width) for _ in range(blocks)]
        head = [nn.GroupNorm(_groups(width), width), nn.ReLU(inplace=True), GlobalHead(width, classes)]
        between = [nn.Identity() for _ in range(slots - 1)]
        self.segments = nn.ModuleList([nn.Sequential(*stem, *trunk), *between, nn.Sequential(*head)])
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stubs


def _groups(width: int) -> int:
    return width // CHANNELS_PER_GROUP if width % CHANNELS_PER_GROUP == 0 else 1


def _convolution(channels: int, width: int, kernel: int) -> nn.Conv2d:
    convolution = nn.Conv2d(channels, width, kernel, padding=kernel // 2)
    _initialise(convolution)
    return convolution


def _initialise(convolution: nn.Conv2d) -> None:
    # With torch's default initialisation, some channels of a narrow block would be zero after the ReLU from
    # the start.
    nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
    nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]  # Conv2d has a bias by default
