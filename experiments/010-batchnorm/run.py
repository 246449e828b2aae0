"""How far off is a contribution measured with the BatchNorm statistics of training?

A small residual network with BatchNorm learns the digits and grows two seeds, by ``esper.Growth``. At its end
every seed is switched off with the statistics as training left them, and with statistics made anew for the
network without it; and, to compare, with statistics of the whole training set. The three trainings are the
same: measuring leaves no trace in them.

Run with ``.venv/bin/python experiments/010-batchnorm/run.py`` (a minute on one core); it rewrites table.md.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
from esper.karn.statistics import estimate
from esper.kasmina import contributions as measuring
from esper.tolaria.batches import BatchCursor
from esper.tolaria.tasks.digits import load_digits

HERE = Path(__file__).parent
RNG_SEEDS = range(5)
EPOCHS, BATCHES, BATCH_SIZE = 14, 16, 64
SLOTS = ("layer1", "layer2")
CALIBRATED_WITH = {
    "statistics of training": None,
    "made anew from 512 inputs": 512,
    "made anew from all training inputs": 10_000,
}


def block(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(width, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
    )


class Net(nn.Module):
    """Narrow, with BatchNorm throughout."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.layer1, self.norm1 = block(width), nn.BatchNorm2d(width)
        self.layer2, self.norm2 = block(width), nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        h = torch.relu(h + self.norm1(self.layer1(h)))
        h = F.max_pool2d(h, 2)
        h = torch.relu(h + self.norm2(self.layer2(h)))
        return self.head(h.mean(dim=(2, 3)))


def contributions(rng_seed: int, samples: int | None) -> dict[str, float]:
    """Points that the score loses without each seed after the last epoch, by slot."""
    torch.manual_seed(rng_seed)
    splits = load_digits(torch.Generator().manual_seed(rng_seed))
    cursor = BatchCursor(len(splits.train), BATCH_SIZE, torch.Generator().manual_seed(rng_seed))
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    x, y = splits.train.x, splits.train.y
    calibrate = None if samples is None else [x[:samples]]
    growth = esper.Growth(
        net, optimizer, sample=x[:2], mode="max", slots=SLOTS, controller=None, calibrate=calibrate
    )

    def evaluate() -> float:
        net.eval()
        with torch.no_grad():
            return 100.0 * (net(splits.validation.x).argmax(1) == splits.validation.y).float().mean().item()

    for epoch in range(EPOCHS):
        if epoch < len(SLOTS):
            growth.germinate(SLOTS[epoch], "conv_heavy")
        net.train()
        for _ in range(BATCHES):
            chosen = cursor.next()
            F.cross_entropy(net(x[chosen]), y[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
        events = growth.end_epoch(evaluate)
    return {event.slot: event.contribution for event in events if event.kind == "measured"}


def main() -> None:
    torch.set_num_threads(1)
    measuring.CALIBRATION_SAMPLES = max(filter(None, CALIBRATED_WITH.values()))
    lines = [f"| statistics | contribution of {SLOTS[0]}, points | of {SLOTS[1]} |", "|---|---|---|"]
    for name, samples in CALIBRATED_WITH.items():
        found = [contributions(rng_seed, samples) for rng_seed in RNG_SEEDS]
        means = [str(estimate([one[slot] for one in found])) for slot in SLOTS]
        lines.append(f"| {name} | {' | '.join(means)} |")
    (HERE / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
