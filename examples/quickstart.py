"""Train a small residual network, let it grow during training, and get a plain module back.

    python examples/quickstart.py

The blocks have 1×1 kernels, which mix channels but not neighbouring pixels. After a tenth of the training a
race compares a 3×3 seed behind each stage with the network trained alone, and plants the winner.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growth.grow import Grown
from esper.tolaria.tasks.digits import load_digits


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x + self.norm(self.conv(x)))


class ResNet(nn.Module):
    """A plain PyTorch module that does not depend on Esper."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 2, stride=2)
        self.layer1 = nn.Sequential(*(Block(width) for _ in range(3)))
        self.layer2 = nn.Sequential(*(Block(width) for _ in range(3)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


def train(rng_seed: int = 0, **how: Any) -> tuple[Grown, float]:
    """Return the network and its validation accuracy; ``controller=None`` trains without growth."""
    torch.set_num_threads(1)
    torch.manual_seed(rng_seed)
    digits = load_digits(torch.Generator().manual_seed(rng_seed))
    train = DataLoader(TensorDataset(digits.train.x, digits.train.y), batch_size=16, shuffle=True)
    val = DataLoader(TensorDataset(digits.validation.x, digits.validation.y), batch_size=120)
    net = ResNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    grown = esper.grow(net, train, val, loss=F.cross_entropy, optimizer=optimizer, slots="layer?", **how)
    with torch.no_grad():
        right = grown.net.eval()(digits.validation.x).argmax(1) == digits.validation.y
    return grown, right.float().mean().item()


def main() -> None:
    grown, accuracy = train(epochs=40)
    print(f"\n{grown.summary()}\nvalidation accuracy {accuracy:.1%}")

    net = grown.net  # still a ResNet, made of torch modules only
    grown.save("grown.safetensors")
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(esper.load("grown.safetensors", base=ResNet()).eval()(x), net(x))


if __name__ == "__main__":
    main()
