"""Train the network of examples/quickstart.py in the folder that is the argument, or continue there.

The program prints a line when ``esper.grow`` is called and a line before the first step of the optimiser.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.run.grow_directory import CHECKPOINT
from esper.tolaria.tasks.digits import load_digits

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from quickstart import ResNet

EPOCHS = 120


def train(out: Path) -> None:
    """Train to the end, from the checkpoint in ``out / "run"`` if there is one; save the network."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits(torch.Generator().manual_seed(0))
    train_loader = DataLoader(TensorDataset(digits.train.x, digits.train.y), batch_size=16, shuffle=True)
    val_loader = DataLoader(TensorDataset(digits.validation.x, digits.validation.y), batch_size=120)
    net = ResNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)

    def before_first_step(*_: Any) -> None:
        print("step", time.time(), flush=True)
        handle.remove()

    handle = optimizer.register_step_pre_hook(before_first_step)
    run = out / "run"
    print("ready", time.time(), flush=True)
    grown = esper.grow(
        net,
        train_loader,
        val_loader,
        loss=F.cross_entropy,
        optimizer=optimizer,
        slots="layer?",
        epochs=EPOCHS,
        cost="flops",
        out=run,
        resume=(run / CHECKPOINT).exists(),
        show=lambda line: None,
    )
    grown.save(out / "grown.pt")


if __name__ == "__main__":
    train(Path(sys.argv[1]))
