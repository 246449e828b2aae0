"""Cost of ``esper.diagnose`` in training steps of the diagnosed network."""

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.timing import figure
from esper import diagnose
from tests.growth.models import BasicBlock

TRAINING_STEPS = 30 * 50_000 // 128
"""Number of training steps in 30 epochs over 50,000 images in batches of 128."""
LIMIT = 0.1
"""Largest allowed cost of ``esper.diagnose``, as a share of the cost of ``TRAINING_STEPS`` training steps."""
BATCH = 128


class ResNet(nn.Module):
    """ResNet with three stages of two blocks, for small images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(16, 16), BasicBlock(16, 16))
        self.layer2 = nn.Sequential(BasicBlock(16, 32, 2), BasicBlock(32, 32))
        self.layer3 = nn.Sequential(BasicBlock(32, 64, 2), BasicBlock(64, 64))
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer3(self.layer2(self.layer1(self.stem(x)))).mean((2, 3)))


def bench_diagnosis_of_a_resnet() -> None:
    torch.manual_seed(0)
    net = ResNet()
    x, y = torch.randn(1024, 3, 8, 8), torch.randint(10, (1024,))
    data = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def train() -> None:
        for inputs, target in data:
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), target).backward()
            optimizer.step()

    reports = []

    def ask() -> None:
        reports.append(
            diagnose(net, data, data, loss=F.cross_entropy, slots=["layer1", "layer2", "layer3"], minutes=60)
        )

    train()
    began = time.process_time()
    train()
    ask()
    asked = time.process_time()
    train()
    spent = time.process_time() - asked
    cost = (asked - began - spent) / (spent / len(data))
    note = f"{len(reports[0].rows)} candidates cost {cost:.0f} steps of training"
    title = "a diagnosis of a ResNet, of 30 epochs of CIFAR's size"
    figure(title, 100 * cost / TRAINING_STEPS, "%", at_most=100 * LIMIT, note=note)
