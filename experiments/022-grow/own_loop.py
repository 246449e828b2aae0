"""Does the default of ``esper.Growth`` pay in a loop of one's own, where nobody hands over a loss?

The hosts and data of run.py, in the loop of the README: 30 epochs, ``end_epoch`` with the accuracy on
validation batches, everything else left at its default. The control is the host trained longer, for what the
grown one has spent; whatever is evaluated more than once in an epoch is charged. Fresh rng seeds.

Run with ``.venv/bin/python experiments/022-grow/own_loop.py [HOST …]`` (15 minutes of CPU); it goes on where
it stopped and rewrites own-loop.md beside this file. first-own-loop.md
has the results of the rule before ADR 0058.
"""

from __future__ import annotations

import json
import sys
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from run import BATCH, CASES, HERE, accuracy, data, read
from torch import Tensor, nn

import esper
from esper.karn.statistics import estimate, paired_difference
from esper.kasmina.compute import flop_counter
from esper.run.factories import one_thread
from esper.tolaria.seeding import TEST_SEEDS

RESULTS = HERE / "own-loop.jsonl"
RNG_SEEDS = TEST_SEEDS[2220:2225]
EPOCHS = 30


def forward_flops(net: nn.Module) -> int:
    """Of one image."""
    net.eval()
    with flop_counter() as counter, torch.no_grad():
        net(torch.zeros(1, 1, 14, 14))
    return int(counter.get_total_flops())


class Evaluation:
    """Accuracies of validation batches; counts the FLOPs of all calls but the first of an epoch."""

    def __init__(self, net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
        self._net, self._batches = net, batches
        self.calls, self.extra_flops = 0, 0

    def __call__(self) -> list[float]:
        self._net.eval()
        self.calls += 1
        if self.calls > 1:
            self.extra_flops += sum(len(x) for x, _ in self._batches) * forward_flops(self._net)
        with torch.no_grad():
            return [(self._net(x).argmax(1) == y).float().mean().item() for x, y in self._batches]


def run(name: str, rng_seed: int, budget: float | None) -> dict[str, Any]:
    """Grow for so many epochs, or train until the budget is spent."""
    case = CASES[name]
    train, validation, test = data(rng_seed)
    torch.manual_seed(rng_seed)
    net = case.build()
    optimizer = torch.optim.AdamW(net.parameters(), lr=case.rate)
    growth = None
    if budget is None:
        growth = esper.Growth(net, optimizer, sample=torch.zeros(2, 1, 14, 14), mode="max", epochs=EPOCHS)
    events: list[str] = []
    spent = 0.0
    for epoch in range(1, EPOCHS + 1) if budget is None else count(1):  # noqa: B007  it is read behind the loop
        step_flops = 3 * BATCH * forward_flops(net)
        net.train()
        for x, y in train:
            if budget is not None and spent + step_flops > budget:
                break
            spent += step_flops
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if growth is not None:
            evaluate = Evaluation(net, list(validation))
            events += [f"{event}" for event in growth.end_epoch(evaluate) if event.kind != "measured"]
            spent += evaluate.extra_flops
        elif budget is not None and spent + step_flops > budget:
            break
    if growth is not None:
        net = growth.finish()
    params = sum(p.numel() for p in net.parameters())
    found = {"accuracy": accuracy(net, *test), "params": params, "epochs": epoch, "flops": spent}
    arm = "grow" if budget is None else "train"
    return {"case": name, "arm": arm, "rng_seed": rng_seed, **found, "events": events}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| host | test accuracy, trained longer | grown | difference, points | parameters | grown | epochs of"
        " the control |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in CASES:
        arms = {
            arm: {r["rng_seed"]: r for r in rows if (r["case"], r["arm"]) == (name, arm)}
            for arm in ("train", "grow")
        }
        seeds = sorted(set(arms["train"]) & set(arms["grow"]))
        if len(seeds) < 2:
            continue
        found = {
            key: [[arms[arm][seed][key] for seed in seeds] for arm in arms]
            for key in ("accuracy", "params", "epochs")
        }
        trained, grown = found["accuracy"]
        sizes = [f"{sum(size) / len(size):,.0f}" for size in found["params"]]
        lines.append(
            f"| {name} | {estimate(trained)} | {estimate(grown)} | {paired_difference(grown, trained)} |"
            f" {' | '.join(sizes)} | {estimate(found['epochs'][0]).mean:.0f} |"
        )
    return "\n".join(lines) + f"\n\n{EPOCHS} epochs grown, equal compute; 95 % over paired rng seeds.\n"


def main(names: list[str]) -> None:
    done = {(row["case"], row["arm"], row["rng_seed"]): row["flops"] for row in read(RESULTS)}
    for rng_seed in RNG_SEEDS:
        for name in names or CASES:
            budget = done.get((name, "grow", rng_seed))
            for arm in ("grow", "train"):
                if (name, arm, rng_seed) in done:
                    continue
                with one_thread():
                    row = run(name, rng_seed, None if arm == "grow" else budget)
                budget = row["flops"]
                with RESULTS.open("a") as out:
                    out.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
    (HERE / "own-loop.md").write_text(table(read(RESULTS)))


if __name__ == "__main__":
    main(sys.argv[1:])
