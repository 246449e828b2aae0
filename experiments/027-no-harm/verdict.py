"""What does ``esper.diagnose`` advise for the GPT of one block, and for a plain CNN of three layers?

Each network is trained as in run.py (the GPT for 10 epochs), without growth, and diagnosed with
6,000 steps. The GPT is too small: it is worse at equal CPU seconds than one with two blocks (the arm "one
more block from the start" in table.md). The CNN has 4 channels.

Run with ``.venv/bin/python experiments/027-no-harm/verdict.py --data FOLDER [GPT] [CNN]``, which replaces
verdicts.md beside this file.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from models import Case, cases, next_token
from run import DECAY, HERE, RNG_SEEDS, held_out, loader, size, test_loss
from torch import Tensor, nn

import esper
from esper.run.factories import one_thread

STEPS = 6_000


class CNN(nn.Module):
    """Three convolutions with BatchNorm, pooling and a linear layer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv3, self.norm3 = nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        h = F.max_pool2d(F.relu(self.norm2(self.conv2(h))), 2)
        return self.head(F.relu(self.norm3(self.conv3(h))).mean((2, 3)))


def advice(case: Case, rng_seed: int) -> str:
    """Train, diagnose and plant; return the report and the parameters before and after planting."""
    torch.manual_seed(rng_seed)
    net, batches = case.build(1), loader(case, rng_seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=case.rate, fused=True)
    for number, (x, y) in enumerate(batch for _ in range(case.epochs) for batch in batches):
        share = number / (case.epochs * len(batches))
        for group in optimizer.param_groups:
            group["lr"] = case.rate * min(1.0, (1.0 - share) / DECAY)
        optimizer.zero_grad()
        next_token(net(x), y).backward()
        optimizer.step()
    before = f"test loss {test_loss(net, case):.4f}, {size(net):,} parameters"
    validation = held_out(case.validation)
    found = esper.diagnose(net, batches, validation, loss=next_token, steps=STEPS, show=lambda _: None)
    after = f"{size(found.plant(net)):,} after planting" if found.verdict == "grow" else "nothing planted"
    return f"{before}, {after}\n\n```text\n{found}\n```\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("models", nargs="*", default=["GPT", "CNN"])
    given = parser.parse_args()
    known = cases(given.data)
    known["GPT"] = replace(known["GPT"], epochs=10)
    pictures = known["ResNet"]
    known["CNN"] = Case(
        lambda _: CNN(4), pictures.train, pictures.validation, pictures.test, 3e-3, 3e-3, 64, 12
    )
    parts = []
    for name in given.models:
        for rng_seed in RNG_SEEDS if name == "GPT" else RNG_SEEDS[:1]:
            with one_thread():
                parts.append(f"## {name}, rng seed {rng_seed}\n\n{advice(known[name], rng_seed)}")
            print(parts[-1], flush=True)
            (HERE / "verdicts.md").write_text("\n".join(parts))


if __name__ == "__main__":
    main()
