"""Networks that a user might train on Fashion-MNIST at 14×14, sound and too small ones; none knows esper."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class Block(nn.Module):
    """A residual block with BatchNorm."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, kernel, padding=kernel // 2, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel, padding=kernel // 2, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x + self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x))))))


class ResNet(nn.Module):
    """A stem that halves the image, and two stages; with ``kernel=1`` its blocks see single pixels only."""

    def __init__(self, width: int = 16, kernel: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 2, stride=2), nn.BatchNorm2d(width), nn.ReLU())
        self.layer1 = Block(width, kernel)
        self.layer2 = nn.Sequential(nn.MaxPool2d(2), Block(width, kernel))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


class MLP(nn.Module):
    """Two hidden layers on the pixels."""

    def __init__(self, width: int = 64, activation: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Flatten(), nn.Linear(196, width), activation())
        self.layer2 = nn.Sequential(nn.Linear(width, width), activation())
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1(x)))
