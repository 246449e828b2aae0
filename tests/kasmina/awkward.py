"""Two modules that were never meant to grow, with what makes wrapping hard: shared in-place
activations, batch statistics, additions in place, skips that join again later."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina import MorphogeneticModel, WrappedHost
from esper.leyline import LifecycleRules
from tests.contracts.matrix import CLASSES, Trial, restart

IMAGE = (2, 8, 8)
BATCH = 16


class Block(nn.Module):
    def __init__(self, channels: int, width: int, stride: int, relu: nn.Module) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = relu
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(channels, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        identity = self.shortcut(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """One in-place ReLU object for the whole network; ``aux`` is never run."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(IMAGE[0], 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(Block(4, 4, 1, self.relu), Block(4, 4, 1, self.relu))
        self.layer2 = nn.Sequential(Block(4, 8, 2, self.relu), Block(8, 8, 1, self.relu))
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(8, CLASSES)
        self.aux = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.bn1(self.conv1(x)))
        h = self.layer2(self.layer1(h))
        return self.fc(self.drop(h.mean(dim=(2, 3))))


class Down(nn.Module):
    """Returns the skip and what goes on: a pair, so no place for a slot."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        skip = self.body(x)
        return skip, F.max_pool2d(skip, 2)


class Up(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.lift = nn.ConvTranspose2d(channels, width, 2, stride=2)
        self.merge = nn.Sequential(nn.Conv2d(2 * width, width, 3, padding=1), nn.LeakyReLU(inplace=True))

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.merge(torch.cat([skip, self.lift(x)], dim=1))


class Labels(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=1, keepdim=True)


class UNet(nn.Module):
    """Classes per pixel; ``labels`` runs along and returns integers."""

    def __init__(self) -> None:
        super().__init__()
        # Registered against the order of execution.
        self.head = nn.Conv2d(4, CLASSES, 1)
        self.up2 = Up(8, 4)
        self.up1 = Up(8, 8)
        self.bottom = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True))
        self.down2 = Down(4, 8)
        self.down1 = Down(IMAGE[0], 4)
        self.labels = Labels()

    def forward(self, x: Tensor) -> Tensor:
        skip1, h = self.down1(x)
        skip2, h = self.down2(h)
        h = self.up1(self.bottom(h), skip2)
        logits = self.head(self.up2(h, skip1))
        self.labels(logits)
        return logits


RESNET_SLOTS = ("bn1", "layer1.0", "layer1.1.bn2", "layer2.0.shortcut", "layer2")
"""In front of an in-place ReLU, between blocks, under ``+=``, on the identity of ``+=``, on a whole layer."""
UNET_SLOTS = ("down1.body", "bottom", "up1.lift", "up1.merge", "head")
"""On a skip, at the bottom, in front of the concatenation, behind it, on the output."""


def net_of(kind: str) -> nn.Module:
    """An untrained network, the same every time."""
    restart(3)
    return ResNet() if kind == "resnet" else UNet()


def slots_of(kind: str) -> tuple[str, ...]:
    return RESNET_SLOTS if kind == "resnet" else UNET_SLOTS


def images(kind: str, number: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets: a class per image, or per pixel."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(BATCH, *IMAGE, generator=generator)
    shape = (BATCH,) if kind == "resnet" else (BATCH, *IMAGE[1:])
    return x, torch.randint(CLASSES, shape, generator=generator)


def wrap(kind: str, slots: tuple[str, ...] | None = None, **rules: object) -> Trial:
    """The network wrapped, with the optimiser of its training."""
    host = WrappedHost(net_of(kind), slots or slots_of(kind), images(kind)[0])
    small = {"min_training_epochs": 1, "min_prune_age": 1, "embargo_epochs": 1}
    model = MorphogeneticModel(host, LifecycleRules(**{**small, **rules}))  # type: ignore[arg-type]
    optimiser = torch.optim.SGD(host.parameters(), lr=0.05, momentum=0.9)
    model.bind_optimiser(optimiser)
    return Trial(model, optimiser)
