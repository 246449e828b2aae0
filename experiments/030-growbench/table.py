"""Controllers on GrowBench, each fitted without the family on which it is evaluated.

Run with ``.venv/bin/python experiments/030-growbench/table.py [FOLDER]``; FOLDER is a recording, the packaged
one by default. The script writes table.md into its folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from esper.growbench import FEATURES, Cell, evaluate, load
from esper.growbench.instances import CLOCKS, DECISION_POINTS, STEPS
from esper.growbench.replay import Features
from esper.growbench.store import PACKAGED
from esper.karn.statistics import Estimate, estimate

HERE = Path(__file__).parent
PROMISE = 0.09  # of tamiyo/counting.py


def value(observation: Features, name: str) -> float:
    """Return a feature; NaN if it is unknown."""
    at = FEATURES.index(name)
    return float(observation[at]) if observation[at + len(FEATURES)] else float("nan")


class Plan:
    """Inserts blocks at fixed decision points."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = steps

    def fit(self, cells: Sequence[Cell]) -> None:
        """Learn nothing."""

    def grows(self, observation: Features) -> bool:
        return round(value(observation, "progress") * STEPS) in self.steps


class BestPlan(Plan):
    """Carries out the plan with the least mean loss on the other families."""

    def __init__(self) -> None:
        super().__init__(())

    def fit(self, cells: Sequence[Cell]) -> None:
        known = set.intersection(*(set(cell.plans) for cell in cells))
        self.steps = min(sorted(known), key=lambda plan: np.mean([cell.regret(plan) for cell in cells]))


class Counting(Plan):
    """Inserts a block when the loss falls by less than 9 % per doubling of compute, as ``counting`` does."""

    def __init__(self) -> None:
        super().__init__(())

    def grows(self, observation: Features) -> bool:
        return value(observation, "gain_per_doubling") + value(observation, "gain_error") < PROMISE


class Regression(Plan):
    """Predicts the gain of inserting a block now instead of later or never, by ridge regression."""

    def __init__(self) -> None:
        super().__init__(())

    def fit(self, cells: Sequence[Cell]) -> None:
        x, y = [], []
        for cell in cells:
            for node, gain in gains(cell).items():
                x.append(cell.observations[node])
                y.append(gain)
        inputs, targets = np.array(x, float), np.array(y)
        self.mean, self.deviation = inputs.mean(0), inputs.std(0) + 1e-6
        inputs = np.c_[(inputs - self.mean) / self.deviation, np.ones(len(y))]
        penalty = 0.03 * len(y) * np.eye(inputs.shape[1])
        self.weights = np.linalg.solve(inputs.T @ inputs + penalty, inputs.T @ targets)

    def grows(self, observation: Features) -> bool:
        return bool(np.r_[(observation - self.mean) / self.deviation, 1.0] @ self.weights > 0)


def gains(cell: Cell) -> dict[int, float]:
    """Return the best log loss after waiting minus that after growing, by node with both actions recorded."""
    losses = dict(zip(cell.plans, cell.losses, strict=True))
    found = {}
    for (prefix, at), node in cell.nodes.items():
        step, count = DECISION_POINTS[at], len(prefix)
        after = {True: [], False: []}
        for plan, loss in losses.items():
            if plan[:count] == prefix and (len(plan) == count or plan[count] >= step):
                after[len(plan) > count and plan[count] == step].append(loss)
        if after[True] and after[False]:
            found[node] = min(after[False]) - min(after[True])
    return found


def headroom(cells: Sequence[Cell]) -> tuple[Estimate, float] | None:
    """Return by how much the best plan of an instance beats the best fixed plan, both chosen on one rng seed
    and evaluated on the other, and the same chosen and evaluated on one rng seed; in percent of the loss."""
    known = sorted(set.intersection(*(set(cell.plans) for cell in cells)))
    pairs: dict[int, list[NDArray[np.float64]]] = {}
    for cell in cells:
        pairs.setdefault(cell.first.instance, []).append(
            np.array([cell.losses[cell.number(plan)] for plan in known])
        )
    both = np.array([two for two in pairs.values() if len(two) == 2])
    if len(both) < 2:
        return None
    leads, optimistic = [], []
    for choose, judge in ((0, 1), (1, 0)):
        fixed = (both[:, choose] - both[:, choose].min(1, keepdims=True)).mean(0).argmin()
        own = both[np.arange(len(both)), judge, both[:, choose].argmin(1)]
        leads.append(100 * (both[:, judge, fixed] - own))
        optimistic.append(100 * (both[:, judge, fixed] - both[:, judge].min(1)))
    return estimate(list(np.mean(leads, axis=0))), float(np.mean(optimistic))


def main() -> None:
    cells = load(Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGED)
    arms = {"never": lambda: Plan(())}
    arms |= {f"clock {factor}": lambda steps=steps: Plan(steps) for factor, steps in CLOCKS.items()}
    arms |= {"counting": Counting, "best fixed plan": BestPlan, "regression": Regression}
    families = list(dict.fromkeys(cell.first.family for cell in cells))
    instances = {cell.first.instance: cell.first.family for cell in cells}
    lines = [
        f"Preliminary: {len(instances)} instances of {len(families)} families, {len(cells)} cells. Regret to"
        " the best recorded plan of the cell in percent of the test loss, mean over instances with 95 %"
        " intervals;"
        " controllers are fitted without the family on which they are evaluated.",
        "",
        "| controller | regret % | " + " | ".join(families) + " | decisions not recorded |",
        "|---|---|" + "---|" * (len(families) + 1),
    ]
    for name, make in arms.items():
        found = evaluate(cells, make)
        by_family = [
            np.mean([regret for number, regret in found.by_instance.items() if instances[number] == family])
            for family in families
        ]
        margin = "" if found.mean.margin is None else f" ± {found.mean.margin:.2f}"
        row = [name, f"{found.mean.mean:.2f}{margin}", *(f"{value:.2f}" for value in by_family)]
        lines.append(f"| {' | '.join([*row, f'{100 * found.refused:.1f} %'])} |")
    lines += [f"| oracle | 0.00 | {' | '.join('0.00' for _ in families)} | 0.0 % |", ""]
    room = headroom(cells)
    if room is not None:
        lines.append(
            f"Headroom, the best plan of an instance against the best fixed plan: {room[0].mean:.2f} ±"
            f" {room[0].half_width:.2f} % if both are chosen on one rng seed and evaluated on the other"
            f" ({room[1]:.2f} % if the plan is chosen on the runs that evaluate it)."
        )
    (HERE / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
