"""Do the defaults of ``esper.grow`` and of ``esper.Growth`` harm a sound network, at equal CPU seconds?

``grow`` trains for a fixed number of epochs. Its CPU seconds, with races and measurements, are the budget of
the other arms. The machine may be busy in one half of a cell and idle in the other, so the budget is
converted to the present speed by the seconds of a training step of the untouched network; the other arms take
turns every few steps. Every arm validates after each epoch and has a constant learning rate that falls to
zero in the last fifth of its seconds.

Run with ``.venv/bin/python experiments/027-no-harm/run.py --data FOLDER [MODEL …]``, where the folder holds
``tinyshakespeare.txt`` and ``cifar10_jpg.tar.xz``. The script continues where it stopped and writes table.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import Any

import torch
from models import Batches, Case, Data, cases, next_token
from torch import nn

import esper
from esper.karn.statistics import estimate
from esper.run.factories import one_thread

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
RNG_SEEDS = (1, 2, 3)
DEEPER_RNG_SEEDS = RNG_SEEDS[:1]
"""Rng seeds with the arm ``deeper``."""
MODELS = ("GPT", "ResNet", "MLP")
DECAY = 0.2
SLICE = 10
"""Steps of the untouched network after which the other arms take their turn."""
ARMS = {
    "plain": "untouched network",
    "grow": "`esper.grow`",
    "own": "`esper.Growth` in an own loop",
    "deeper": "one more block from the start",
}


def loader(case: Case, rng_seed: int) -> Batches:
    return Batches(case.train, case.batch, torch.Generator().manual_seed(rng_seed))


def held_out(data: Data) -> list[Data]:
    return list(zip(data[0].split(500), data[1].split(500), strict=True))


@torch.no_grad()
def losses(net: nn.Module, batches: list[Data]) -> list[float]:
    net.eval()
    found = [float(next_token(net(x), y)) for x, y in batches]
    net.train()
    return found


class Arm:
    """Training of one network in a loop of its own, with the CPU seconds that it has used."""

    def __init__(self, case: Case, rng_seed: int, *, blocks: int = 1, grows: bool = False) -> None:
        self.case, self.batches = case, loader(case, rng_seed)
        torch.manual_seed(rng_seed)
        self.net = case.build(blocks)
        self.rate = case.rate if blocks == 1 else case.deeper_rate
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=self.rate, fused=True)
        self.validation = held_out(case.validation)
        self.seconds, self.steps, self.train_seconds = 0.0, 0, 0.0
        self.events: list[str] = []
        self.validated: list[float] = []
        self.growth = None
        began = process_time()
        if grows:
            self.growth = esper.Growth(
                self.net,
                self.optimizer,
                sample=case.train[0][:2],
                mode="min",
                epochs=case.epochs,
                calibrate=[x for x, _ in loader(case, rng_seed)],
            )
        self.seconds += process_time() - began
        self._epoch = iter(self.batches)

    def step(self, share: float) -> None:
        """Train on one minibatch at a share of the budget; end the epoch if it was the last one."""
        began = process_time()
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, (1.0 - share) / DECAY)
        batch = next(self._epoch, None)
        if batch is None:
            self._end_epoch()
            self._epoch = iter(self.batches)
            batch = next(self._epoch)
            self.seconds += process_time() - began
            began = process_time()
        x, y = batch
        self.optimizer.zero_grad()
        next_token(self.net(x), y).backward()
        self.optimizer.step()
        self.steps += 1
        self.train_seconds += process_time() - began
        self.seconds += process_time() - began

    def _end_epoch(self) -> None:
        if self.growth is None:
            self.validated.append(fmean(losses(self.net, self.validation)))
        else:
            made = self.growth.end_epoch(lambda: losses(self.net, self.validation))
            self.validated.append(-self.growth.facts.val_score)
            self.net.train()
            self.events += [str(event) for event in made if event.kind != "measured"]

    def result(self) -> dict[str, Any]:
        net = self.net if self.growth is None else self.growth.finish()
        return {
            "loss": test_loss(net, self.case),
            "params": size(net),
            "steps": self.steps,
            "events": self.events,
            "validated": self.validated,
        }


def test_loss(net: nn.Module, case: Case) -> float:
    return fmean(losses(net, held_out(case.test)))


def size(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def grown(case: Case, rng_seed: int) -> tuple[dict[str, Any], float, float]:
    """Return the result of ``grow``, its CPU seconds, and those of a step of the untouched network in it."""
    batches = loader(case, rng_seed)
    torch.manual_seed(rng_seed)
    net = case.build(1)
    began = process_time()
    optimizer = torch.optim.AdamW(net.parameters(), lr=case.rate, fused=True)
    found = esper.grow(
        net,
        batches,
        held_out(case.validation),
        loss=next_token,
        epochs=case.epochs,
        optimizer=optimizer,
        show=lambda _: None,
    )
    seconds = process_time() - began
    planted = [event.epoch for event in found.events if event.kind == "germinated"]
    untouched = batches.seconds[: min(planted, default=case.epochs)]
    walls = found.ledger.seconds
    result = {
        "loss": test_loss(found.net, case),
        "params": size(found.net),
        "steps": case.epochs * len(batches),
        "events": [str(event) for event in found.events if event.kind != "measured"],
        "race share": walls.get("race", 0.0) / sum(walls.values()),
    }
    return result, seconds, sum(untouched) / len(untouched) / len(batches)


def cell(name: str, case: Case, rng_seed: int) -> list[dict[str, Any]]:
    """Return the results of all arms for one network and rng seed."""
    result, budget, step_seconds = grown(case, rng_seed)
    plain = Arm(case, rng_seed)
    others = {"own": Arm(case, rng_seed, grows=True)}
    if rng_seed in DEEPER_RNG_SEEDS:
        others["deeper"] = Arm(case, rng_seed, blocks=2)
    share = 0.0
    while share < 1.0:
        for _ in range(SLICE):
            plain.step(share)
        for arm in others.values():
            while arm.seconds < plain.seconds:
                arm.step(share)
        speed = step_seconds / (plain.train_seconds / plain.steps)
        share = min(1.0, plain.seconds * speed / budget)
    arms = {"grow": result, **{arm: each.result() for arm, each in {"plain": plain, **others}.items()}}
    common = {"model": name, "rng_seed": rng_seed, "budget": budget, "plain step ms": 1000 * step_seconds}
    return [{**common, "arm": arm, **found} for arm, found in arms.items()]


def read() -> list[dict[str, Any]]:
    found = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    return sorted(found, key=lambda row: (row["rng_seed"], MODELS.index(row["model"])))


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "Test loss at equal CPU seconds; difference from the untouched network in % of its loss, paired by"
        " rng seed, 95 % intervals.",
        "",
        "| network | CPU s | arm | test loss by rng seed | difference, % | steps | parameters | planted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in MODELS:
        own = [row for row in rows if row["model"] == name]
        plain = {row["rng_seed"]: row["loss"] for row in own if row["arm"] == "plain"}
        for arm, words in ARMS.items():
            found = [row for row in own if row["arm"] == arm]
            if not found:
                continue
            gaps = [100 * (row["loss"] / plain[row["rng_seed"]] - 1) for row in found]
            gap = "" if arm == "plain" else f"{estimate(gaps)}" if len(gaps) > 1 else f"{gaps[0]:+.1f}"
            planted = sum(any("was planted" in event for event in row["events"]) for row in found)
            cells = [
                name,
                f"{fmean(row['budget'] for row in found):.0f}",
                words,
                ", ".join(f"{row['loss']:.4f}" for row in found),
                gap,
                f"{fmean(row['steps'] for row in found):,.0f}",
                f"{fmean(row['params'] for row in found):,.0f}",
                f"{planted} of {len(found)}" if arm in ("grow", "own") else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Is the untouched network sound at this length? Last validation loss against the lowest one:",
        "",
    ]
    for row in rows:
        if row["arm"] == "plain":
            last, least = row["validated"][-1], min(row["validated"])
            lines.append(
                f"- {row['model']}, rng seed {row['rng_seed']}: {last:.4f}, lowest {least:.4f}"
                f" ({100 * (last / least - 1):+.2f} %)"
            )
    lines += ["", "What happened:", ""]
    lines += [
        f"- {row['model']}, {row['arm']}, rng seed {row['rng_seed']}: {'; '.join(row['events']) or 'nothing'}"
        + (f" (races: {row['race share']:.0%} of the seconds)" if "race share" in row else "")
        for row in rows
        if row["arm"] in ("grow", "own")
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    given = parser.parse_args()
    known = cases(given.data)
    rows = read()
    done = {(row["model"], row["rng_seed"]) for row in rows}
    for rng_seed in RNG_SEEDS:
        for name in given.models:  # A cell takes one to two CPU minutes.
            if (name, rng_seed) in done:
                continue
            with one_thread():
                found = cell(name, known[name], rng_seed)
            with RESULTS.open("a") as out:
                out.writelines(json.dumps(row) + "\n" for row in found)
            rows = read()  # Another process may have added rows of other networks.
            for row in found:
                print(json.dumps(row), flush=True)
            (HERE / "table.md").write_text(table(rows))


if __name__ == "__main__":
    main()
