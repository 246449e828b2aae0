"""How should hidden units start that are added to a CNN at 5 % of its training? All arms use equal FLOPs.

A plain CNN of three convolutions (c, c and 8 channels) with BatchNorm learns CIFAR-10 at 16×16 pixels. In
the arms that grow, ``widen`` adds as many units as there are to both pairs of layers: c rises from 4 to 8.
Until the network is finished, its new units are parameters of their own, except in the arm ``in place``.

Run with ``.venv/bin/python experiments/025-width/run.py FOLDER``; FOLDER contains ``train`` and ``test`` with
one folder of images per class. The script continues where it stopped and writes table.md beside this file.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from esper.growth.growth import Growth
from esper.karn.statistics import paired_difference
from esper.kasmina.blueprints import widen
from esper.kasmina.compute import forward_flops
from esper.run.factories import one_thread
from esper.tolaria.seeding import TEST_SEEDS

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
TRAINED, VALIDATED, BATCH, PIXELS = 20_000, 4_000, 64, 16
STEPS_OF_LARGE = 3_000
RATE, AT, DECAY, WARM_UP = 3e-3, 0.05, 0.2, 0.05
MARKS = (1 / 8, 1 / 4, 1 / 2, 1.0)
RNG_SEEDS = TEST_SEEDS[2500:2506]
ARMS = {
    "4 channels": "never wider",
    "8 channels": "wide from the start",
    "normal": "normal weights of the same RMS, outgoing weights zero (the blueprint)",
    "copies": "copies of the present units, outgoing weights zero",
    "duplicates": "copies of the present units, outgoing weights of both halved, 1 % noise",
    "re-warmed": "as normal; the learning rate of all weights rises again from zero over 5 % of the budget",
    "in place": "as normal; units are part of the layers at once, with carried moments",
}


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


def images(folder: Path, count: int) -> tuple[Tensor, Tensor]:
    """Return ``count`` images, equally many of each class, and their classes."""
    pixels, classes = [], []
    for number, name in enumerate(sorted(p for p in folder.iterdir() if p.is_dir())):
        for path in sorted(name.glob("*.jpg"))[: count // 10]:
            small = Image.open(path).convert("RGB").resize((PIXELS, PIXELS), Image.Resampling.BOX)
            pixels.append(np.asarray(small))
            classes.append(number)
    x = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 127.5 - 1
    return x, torch.tensor(classes)


def add_units(net: CNN, optimiser: torch.optim.Optimizer, arm: str, sample: Tensor) -> Growth:
    """Add 4 units to each of the two pairs of layers, as the arm demands."""
    growth = Growth(net, optimiser, sample=sample, slots=["conv1", "conv2"], controller=None)
    for slot in growth.slots:
        growth.germinate(slot, "widen")
    copied = [(slot.seed, slot.place.layers) for slot in growth.network.slots]
    if arm in ("copies", "duplicates"):
        with torch.no_grad():
            for seed, layers in copied:
                seed.inner[0].load_state_dict(layers.first[0].state_dict(), strict=False)
                seed.norm.load_state_dict(layers.norm.state_dict())
    if arm == "duplicates":
        with torch.no_grad():
            for seed, layers in copied:
                half = layers.second.weight / 2
                seed.outer.weight.copy_(half * (1 + 0.01 * torch.randn_like(half)))
            for _, layers in copied:
                layers.second.weight.div_(2)
    if arm == "in place":
        growth.finish()
    return growth


def batches(x: Tensor, y: Tensor, rng_seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield endless random batches; half of the images are mirrored."""
    generator = torch.Generator().manual_seed(rng_seed)
    while True:
        for chosen in torch.randperm(len(x), generator=generator).split(BATCH):
            images = x[chosen]
            yield images.flip(-1) if torch.rand((), generator=generator) < 0.5 else images, y[chosen]


@torch.no_grad()
def validation(net: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    net.eval()
    output = torch.cat([net(part) for part in x.split(1000)])
    net.train()
    return F.cross_entropy(output, y).item(), (output.argmax(1) == y).float().mean().item()


def rate_at(share: float, arm: str) -> float:
    """Return the factor of the learning rate at a share of the budget."""
    factor = min(1.0, (1 - share) / DECAY, share / 0.01 + 0.01)
    is_again = arm == "re-warmed" and AT <= share < AT + WARM_UP
    return factor * ((share - AT) / WARM_UP + 0.01 if is_again else 1.0)


def train(arm: str, rng_seed: int, data: list[Tensor]) -> dict[str, Any]:
    x, y, val_x, val_y = data
    torch.manual_seed(rng_seed)
    budget = STEPS_OF_LARGE * forward_flops(CNN(8), x[:1])
    torch.manual_seed(rng_seed)
    net = CNN(8 if arm == "8 channels" else 4)
    optimiser = torch.optim.Adam(net.parameters(), lr=RATE)
    cost, spent, growth, losses = forward_flops(net, x[:1]), 0.0, None, []
    stream, began, marks = batches(x, y, rng_seed), time.process_time(), list(MARKS)
    while marks:
        if growth is None and arm not in ("4 channels", "8 channels") and spent >= AT * budget:
            growth = add_units(net, optimiser, arm, x[:2])
            cost = forward_flops(net, x[:1])
        for group in optimiser.param_groups:
            group["lr"] = RATE * rate_at(spent / budget, arm)
        images, classes = next(stream)
        optimiser.zero_grad()
        F.cross_entropy(net(images), classes).backward()
        optimiser.step()
        spent += cost
        while marks and spent >= marks[0] * budget:
            losses.append(validation(net, val_x, val_y))
            marks.pop(0)
    if growth is not None and arm != "in place":
        growth.finish()
        after = validation(net, val_x, val_y)[0]
        assert math.isclose(after, losses[-1][0], rel_tol=1e-3)
    assert net.conv2.out_channels == (4 if arm == "4 channels" else 8)
    return {
        "arm": arm,
        "rng_seed": rng_seed,
        "losses": [loss for loss, _ in losses],
        "accuracy": losses[-1][1],
        "seconds": time.process_time() - began,
    }


def write_table(rows: list[dict[str, Any]]) -> None:
    """Write means of all arms, and paired differences to the arm ``normal`` with 95 % intervals."""

    def of(arm: str, get: Callable[[dict[str, Any]], float]) -> list[float]:
        return [get(row) for row in sorted(rows, key=lambda r: r["rng_seed"]) if row["arm"] == arm]

    counts = {arm: len(of(arm, lambda row: row["accuracy"])) for arm in ARMS}
    lines = [
        "Validation loss at shares of the budget, mean over paired rng seeds; 95 % intervals.",
        "",
        "| arm | start of the new units | 1/8 | 1/4 | 1/2 | all | all, minus normal | accuracy | CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    normal = of("normal", lambda row: row["losses"][-1])
    for arm, meaning in ARMS.items():
        if not counts[arm]:
            continue
        marks = [np.mean(of(arm, lambda row, i=i: row["losses"][i])) for i in range(len(MARKS))]
        end = of(arm, lambda row: row["losses"][-1])
        n = min(len(end), len(normal))
        gap = paired_difference(end[:n], normal[:n])
        difference = "" if arm == "normal" else f"{gap.mean:+.3f} ± {gap.half_width:.3f}"
        accuracy = 100 * np.mean(of(arm, lambda row: row["accuracy"]))
        seconds = np.mean(of(arm, lambda row: row["seconds"]))
        cells = [
            arm,
            meaning,
            *(f"{loss:.3f}" for loss in marks),
            difference,
            f"{accuracy:.1f}",
            f"{seconds:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"rng seeds per arm: {', '.join(f'{arm} {count}' for arm, count in counts.items())}", ""]
    (HERE / "table.md").write_text("\n".join(lines))


def main() -> None:
    one_thread()
    widen.SHARE_OF_NEW_UNITS = 1.0
    folder = Path(sys.argv[1])
    data = [*images(folder / "train", TRAINED), *images(folder / "test", VALIDATED)]
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {(row["arm"], row["rng_seed"]) for row in rows}
    for rng_seed in RNG_SEEDS:
        for arm in ARMS:
            if (arm, rng_seed) not in done:
                rows.append(train(arm, rng_seed, data))
                with RESULTS.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(rows[-1], flush=True)
        write_table(rows)


if __name__ == "__main__":
    main()
