"""Find out whether a model is too small and where, grow it there, and compare the gain with the prediction.

python examples/is_it_too_small.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.tolaria.tasks.digits import load_digits


class Net(nn.Module):
    """A CNN that cannot detect shapes, because its kernels are 1×1."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 8, 1), nn.ReLU())
        self.layer2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 8, 1), nn.ReLU())
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1(x)).mean((2, 3)))


def train(net: nn.Module, loader: DataLoader, epochs: int) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    net.train()
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits(torch.Generator().manual_seed(0))
    train_loader = DataLoader(TensorDataset(digits.train.x, digits.train.y), batch_size=64, shuffle=True)
    val_loader = DataLoader(TensorDataset(digits.validation.x, digits.validation.y), batch_size=120)
    net = Net()
    train(net, train_loader, epochs=40)

    # Candidates that are larger than the network itself are tried because they are named.
    report = esper.diagnose(
        net,
        train_loader,
        val_loader,
        loss=F.cross_entropy,
        slots=["layer1", "layer2"],
        blueprints=["conv_light", "conv_heavy"],
    )
    print(report)
    if report.verdict == "grow":
        report.plant(net)  # create the optimiser after this call
        train(net, train_loader, epochs=8)
        print("\n" + str(report.compare(net)))


if __name__ == "__main__":
    main()
