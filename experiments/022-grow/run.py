"""Is a network better off with ``esper.grow``? The same host, optimiser, schedule and compute, grown or not.

Two hosts that are sound and two that are too small, on Fashion-MNIST at 14×14 (Debian's package
dataset-fashion-mnist): 16,384 images to train on, 2,048 to validate with, the whole test set. Arms:

- train: ``esper.grow`` with ``controller=None``, which never plants;
- grow: ``esper.grow`` as it is, with nothing set but what the first arm has;
- larger: for a host that is too small, a fixed size that would have been right, trained like the first arm.

All arms of a host spend the same FLOPs: training, races, counterfactuals, seeds that were removed. A first
rule, chosen on selection rng seeds, was tried on five test rng seeds (first-rule.jsonl): the ResNet was
0.23 ± 0.29 points below, of the MLPs without activations 3 of 5 were grown. For the present one a seed has to
give half as much, a race compares on twice as many images, and training goes on where the race's control is;
the table is of five fresh rng seeds.

Run with ``.venv/bin/python experiments/022-grow/run.py [select] [HOST …]`` (4 to 20 CPU-seconds for each arm
and rng seed); it goes on where it stopped and rewrites table.md beside this file. ``run.py diagnose HOST …``
prints what ``esper.diagnose`` says of a trained host, without a limit and with a tenth of its training;
``run.py whole HOST …`` the same after 30 epochs of all of Fashion-MNIST, with the share in CPU time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from hosts import MLP, ResNet
from torch import Tensor, nn

import esper
from esper.karn.statistics import estimate, paired_difference
from esper.kasmina.compute import flop_counter
from esper.run.factories import one_thread
from esper.tolaria.seeding import SELECTION_SEEDS, TEST_SEEDS
from esper.tolaria.tasks.images import fashion14

HERE = Path(__file__).parent
RESULTS, FIRST_RULE, SELECTED = (HERE / f"{n}.jsonl" for n in ("results", "first-rule", "selection"))
TRAINED, VALIDATED, BATCH = 16_384, 2_048, 64
RNG_SEEDS = TEST_SEEDS[2210:2215]


class Case(NamedTuple):
    """A host and its training."""

    build: Callable[[], nn.Module]
    steps: int
    """Minibatches of the host that the budget would buy."""
    rate: float
    larger: Callable[[], nn.Module] | None = None
    """A size that is not too small."""


CASES = {
    "ResNet": Case(ResNet, 3000, 5e-3),
    "MLP": Case(MLP, 6000, 2e-3),
    "ResNet, 1×1 kernels": Case(lambda: ResNet(kernel=1), 7000, 5e-3, ResNet),
    "MLP, no activations": Case(lambda: MLP(activation=nn.Identity), 8000, 2e-3, MLP),
}


class Batches:
    """Minibatches in a new order each time."""

    def __init__(self, x: Tensor, y: Tensor, batch: int, generator: torch.Generator | None = None) -> None:
        self._x, self._y, self._batch, self.generator = x, y, batch, generator

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count = len(self._x)
        order = torch.arange(count)
        if self.generator is not None:
            order = torch.randperm(count, generator=self.generator)
        for index in order.split(self._batch):
            yield self._x[index], self._y[index]


def data(rng_seed: int, trained: int = TRAINED) -> tuple[Batches, Batches, tuple[Tensor, Tensor]]:
    """To train, to validate and to test; the first two drawn anew for each rng seed."""
    offered, reserved = fashion14()
    generator = torch.Generator().manual_seed(rng_seed)
    order = torch.randperm(len(offered.labels), generator=generator)
    chosen, held_out = order[:trained], order[trained : trained + VALIDATED]
    pixels = offered.images[chosen].float()
    mean, spread = pixels.mean(), pixels.std()

    def scaled(images: Tensor) -> Tensor:
        return (images.float() - mean) / spread

    train = Batches(scaled(offered.images[chosen]), offered.labels[chosen], BATCH, generator)
    validation = Batches(scaled(offered.images[held_out]), offered.labels[held_out], 128)
    return train, validation, (scaled(reserved.images), reserved.labels)


def budget_of(case: Case) -> float:
    net = case.build()
    with flop_counter() as counter, torch.no_grad():
        net(torch.zeros(1, 1, 14, 14))
    return 3.0 * BATCH * case.steps * counter.get_total_flops()


@torch.no_grad()
def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """In per cent."""
    net.eval()
    right = sum(int((net(a).argmax(1) == b).sum()) for a, b in zip(x.split(500), y.split(500), strict=True))
    return 100 * right / len(y)


def run(name: str, arm: str, rng_seed: int) -> dict[str, Any]:
    case = CASES[name]
    train, validation, test = data(rng_seed)
    torch.manual_seed(rng_seed)
    net = (case.larger if arm == "larger" and case.larger else case.build)()
    optimizer = torch.optim.AdamW(net.parameters(), lr=case.rate)
    began = time.process_time()
    grown = esper.grow(
        net,
        train,
        validation,
        loss=F.cross_entropy,
        budget=budget_of(case),
        cost="flops",
        optimizer=optimizer,
        controller="auto" if arm == "grow" else None,
        show=lambda _: None,
    )
    return {
        "case": name,
        "arm": arm,
        "rng_seed": rng_seed,
        "accuracy": accuracy(grown.net, *test),
        "val_loss": grown.epochs[-1].val_loss,
        "params": grown.epochs[-1].params,
        "flops": grown.epochs[-1].flops / budget_of(case),
        "events": [str(event) for event in grown.events if event.kind != "measured"],
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def diagnosed(name: str, rng_seed: int) -> str:
    """What a diagnosis of the trained host says, and what it costs."""
    case = CASES[name]
    train, validation, _ = data(rng_seed)
    torch.manual_seed(rng_seed)
    net = case.build()
    optimizer = torch.optim.AdamW(net.parameters(), lr=case.rate)
    known = {"loss": F.cross_entropy, "optimizer": optimizer}
    trained = esper.grow(
        net, train, validation, budget=budget_of(case), controller=None, show=lambda _: None, **known
    )
    budget = budget_of(case)
    found = [
        esper.diagnose(trained.net, train, validation, steps=steps, cost="flops", **known)
        for steps in (100 * case.steps, case.steps // 10)
    ]
    said = [f"{each.verdict} ({each.flops / budget:.1%} of the training's compute)" for each in found]
    return f"{name}: {said[0]}; limited to a tenth: {said[1]}"


def whole(name: str, rng_seed: int) -> str:
    """What a diagnosis costs beside a training of the usual length, in FLOPs and in CPU time."""
    case, images, epochs = CASES[name], 60_000 - VALIDATED, 30
    train, validation, _ = data(rng_seed, images)
    torch.manual_seed(rng_seed)
    net = case.build()
    optimizer = torch.optim.AdamW(net.parameters(), lr=case.rate)
    began = time.process_time()
    for _ in range(epochs):
        for x, y in train:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    trained = time.process_time()
    loss = F.cross_entropy
    found = esper.diagnose(net, train, validation, loss=loss, minutes=60, optimizer=optimizer, cost="flops")
    seconds = (time.process_time() - trained) / (trained - began)
    flops = found.flops * case.steps * BATCH / (budget_of(case) * images * epochs)
    cost = f"{flops:.1%} of the compute and {seconds:.1%} of the CPU time of {epochs} epochs"
    return f"{name}: {found.verdict}; {cost}"


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def fill(file: Path, rng_seeds: list[int], names: list[str]) -> None:
    """Run what is missing."""
    done = {(row["case"], row["arm"], row["rng_seed"]) for row in read(file)}
    for rng_seed in rng_seeds:
        for name in names:
            arms = ("train", "grow", "larger") if CASES[name].larger else ("train", "grow")
            for arm in arms:
                if (name, arm, rng_seed) not in done:
                    row = run(name, arm, rng_seed)
                    with file.open("a") as out:
                        out.write(json.dumps(row) + "\n")
                    print(json.dumps(row), flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Accuracies, the difference by rng seed, and what was planted."""
    lines = [
        "| host | test accuracy, trained | grown | difference, points | parameters, trained | grown | planted"
        " | larger from the start |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in CASES:
        found = {(row["arm"], row["rng_seed"]): row for row in rows if row["case"] == name}
        done = [seed for arm, seed in found if arm == "grow" and ("train", seed) in found]
        if not done:
            continue
        trained, grown = ([found[arm, seed] for seed in done] for arm in ("train", "grow"))
        larger = [found["larger", seed] for seed in done if ("larger", seed) in found]
        gain = paired_difference(_accuracies(grown), _accuracies(trained))
        seeds = sum("was planted" in event for row in grown for event in row["events"])
        params = [f"{sum(row['params'] for row in arm) / len(arm):,.0f}" for arm in (trained, grown)]
        cells = [
            name,
            _mean(trained),
            _mean(grown),
            f"{gain.mean:+.2f} ± {gain.half_width:.2f}",
            *params,
            f"{seeds} in {len(done)} runs",
            _mean(larger) if larger else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| host | rng seed | trained | grown | compute, grown | what happened |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["arm"] == "grow":
            other = next(
                r
                for r in rows
                if (r["case"], r["arm"], r["rng_seed"]) == (row["case"], "train", row["rng_seed"])
            )
            said = "; ".join(row["events"]) or "nothing"
            lines.append(
                f"| {row['case']} | {row['rng_seed']} | {other['accuracy']:.2f} | {row['accuracy']:.2f} |"
                f" {row['flops']:.3f} B | {said} |"
            )
    return "\n".join(lines) + "\n"


def _accuracies(rows: list[dict[str, Any]]) -> list[float]:
    return [row["accuracy"] for row in rows]


def _mean(rows: list[dict[str, Any]]) -> str:
    return f"{estimate(_accuracies(rows)).mean:.2f}"


def main() -> None:
    one_thread()
    arguments = sys.argv[1:]
    if arguments[:1] == ["diagnose"]:
        print(*(diagnosed(name, SELECTION_SEEDS[2200]) for name in arguments[1:]), sep="\n")
        return
    if arguments[:1] == ["whole"]:
        print(*(whole(name, SELECTION_SEEDS[2200]) for name in arguments[1:]), sep="\n")
        return
    selecting = arguments[:1] == ["select"]
    names = arguments[1:] if selecting else arguments
    if selecting:
        fill(SELECTED, list(SELECTION_SEEDS[2200:2202]), names or list(CASES))
    else:
        fill(RESULTS, list(RNG_SEEDS), names or list(CASES))
    caption = "Difference: grown minus trained, 95 % interval over paired rng seeds. B is the budget."
    tables = f"## Fresh rng seeds\n\n{table(read(RESULTS))}\n## First rule\n\n{table(read(FIRST_RULE))}"
    (HERE / "table.md").write_text(f"{caption}\n\n{tables}")


if __name__ == "__main__":
    main()
