"""How far off is a contribution measured with the BatchNorm statistics of training?

A small residual network with BatchNorm learns the digits and grows two seeds. At its end every seed is
switched off with the statistics as training left them, and with statistics made anew for the network
without it; and, to compare, with statistics of the whole training set.

Run with ``.venv/bin/python experiments/010-batchnorm/run.py`` (a minute on one core); it rewrites table.md.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper import MorphogeneticModel, wrap
from esper.karn.statistics import estimate
from esper.leyline import BLUEPRINT_IDS, CANONICAL_ACTION, Head, LifecycleOp, LifecycleRules, Tempo
from esper.tolaria import calibration
from esper.tolaria.actuator import advance, apply_action, tick
from esper.tolaria.data import BatchCursor, Splits
from esper.tolaria.minibatch import train_batch
from esper.tolaria.objective import CLASSIFICATION
from esper.tolaria.slot_measurements import record_training
from esper.tolaria.switching import outputs_by_replay
from esper.tolaria.tasks.digits import load_digits

HERE = Path(__file__).parent
RNG_SEEDS = range(5)
EPOCHS, BATCHES, BATCH_SIZE = 14, 16, 64
SLOTS = (0, 1)
CONFIGURATIONS = np.array([[False, True], [True, False], [True, True]])


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


def grow(rng_seed: int) -> tuple[MorphogeneticModel, Splits]:
    torch.manual_seed(rng_seed)
    splits = load_digits(torch.Generator().manual_seed(rng_seed))
    cursor = BatchCursor(len(splits.train), BATCH_SIZE, torch.Generator().manual_seed(rng_seed))
    network = Net()
    model = wrap(
        network, ["layer?"], splits.train.x[:2], LifecycleRules(min_training_epochs=2), rng_seed=rng_seed
    )
    optimiser = torch.optim.AdamW(network.parameters(), lr=0.01)
    model.bind_optimiser(optimiser)
    for epoch in range(EPOCHS):
        if epoch in SLOTS:
            action = CANONICAL_ACTION.copy()
            action[Head.OP], action[Head.SLOT], action[Head.TEMPO] = LifecycleOp.GERMINATE, epoch, Tempo.FAST
            action[Head.BLUEPRINT] = BLUEPRINT_IDS.index("conv_heavy")
            apply_action(model, action, seed_id=epoch)
        model.train()
        for number in range(BATCHES):
            chosen = cursor.next()
            x, y = splits.train.x[chosen], splits.train.y[chosen]
            last = number == BATCHES - 1
            facts = train_batch(model, optimiser, x, y, F.cross_entropy, clip=5.0, measure=last)
        tick(model)
        record_training(model.table, facts)
        advance(model)
    return model, splits


def contributions(model: MorphogeneticModel, splits: Splits, inputs: Tensor | None) -> list[float]:
    """Points that the score loses without each seed; with no inputs, statistics as training left them."""
    model.eval()
    x, y = splits.validation.x, splits.validation.y
    answers = outputs_by_replay(model, x, SLOTS, CONFIGURATIONS, inputs)
    scores = [CLASSIFICATION.sample_scores(output, y).mean().item() for _, _, output in answers]
    return [scores[2] - scores[0], scores[2] - scores[1]]


def main() -> None:
    torch.set_num_threads(1)
    calibration.CALIBRATION_SAMPLES = 10_000
    found: dict[str, list[list[float]]] = {}
    for rng_seed in RNG_SEEDS:
        model, splits = grow(rng_seed)
        everything = splits.train.x
        for name, inputs in (
            ("statistics of training", None),
            ("made anew from 512 inputs", everything[:512]),
            ("made anew from all training inputs", everything),
        ):
            found.setdefault(name, []).append(contributions(model, splits, inputs))
    lines = ["| statistics | contribution of r0c0, points | of r0c1 |", "|---|---|---|"]
    for name, pairs in found.items():
        first, second = (estimate([pair[slot] for pair in pairs]) for slot in SLOTS)
        lines.append(f"| {name} | {first} | {second} |")
    (HERE / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
