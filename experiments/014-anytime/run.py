"""One run that grows against every fixed size, at every budget.

Every run is charged in FLOPs and answers at six marks (1/32 … 1 of its budget): at 0.8 of a mark it is
copied, the copy's learning rate falls to zero, and the copy is tested at the mark. So an answer at a mark has
cost the mark, for fixed sizes and for networks that grow alike.

regret(mark) = mean over rng seeds of (loss − loss of the fixed size that was best there on a selection rng
seed) / the latter. An arm is worth its largest regret; intervals are by bootstrap over rng seeds, everything
recomputed. Sizes that are far off at small marks and best at no later one are not run to the end.
``sweep`` trains sizes 1 to 4 with a quarter of the mark each and takes the best by validation.

Run with ``.venv/bin/python experiments/014-anytime/run.py [COMPARISON [ARM …]]`` (75 CPU-seconds for each arm
and rng seed, 180 with the longer budget); it goes on where it stopped and rewrites table.md and picture.svg.
``pycode_scaling`` is kept here; ``longer``, the same with 4.2 TFLOP, so that the smallest mark holds 200
minibatches of six layers, in a folder of its own; ``fashion_scaling`` in 016-images.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from esper.karn.drawing.curves import Curve, draw_curves
from esper.karn.drawing.picture import Picture
from esper.karn.resampling import FloatArray, interval, largest, regrets
from esper.run.factories import one_thread
from esper.tamiyo import CountingController
from esper.tolaria.budget_marks import branches
from esper.tolaria.env import MorphEnv
from esper.tolaria.seeding import SELECTION_SEEDS, TEST_SEEDS
from esper.tolaria.tasks import TaskSpec, task_named


class Comparison(NamedTuple):
    """A task, the fixed sizes that growth could reach there, and the rng seeds that all arms share."""

    task: TaskSpec
    folder: str
    sizes: Sequence[int]
    rng_seeds: Sequence[int]
    reach: Mapping[str, int]
    """Marks of sizes that are far off at small ones and best at no later one; all six for selection."""


MARKS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
PYCODE = task_named("pycode_scaling")
COMPARISONS = {
    "pycode_scaling": Comparison(PYCODE, "014-anytime", range(1, 7), TEST_SEEDS[1001:1006], {"2": 5, "6": 2}),
    "longer": Comparison(
        replace(PYCODE, budget=4_200 * 10**9),
        "014-anytime/longer",
        range(1, 7),
        TEST_SEEDS[1006:1011],
        {"2": 4, "3": 4, "4": 4, "6": 2},
    ),
    "fashion_scaling": Comparison(
        task_named("fashion_scaling"),
        "016-images",
        range(1, 9),
        TEST_SEEDS[1001:1006],
        {"3": 3, **dict.fromkeys("45678", 2)},
    ),
}
"""With the rng seed before these an earlier form of ``counting`` was found wanting."""
SWEPT = ("1", "2", "3", "4")
FINER = 4
"""For the sweep: the smallest marks have a quarter, in steps a quarter as long."""
Losses = Mapping[str, Mapping[int, Sequence[float]]]
"""Test losses by arm, rng seed and mark."""


def reach_of(comparison: Comparison, arm: str, rng_seed: int) -> int:
    """How many marks an arm is run for."""
    return len(MARKS) if rng_seed in SELECTION_SEEDS else comparison.reach.get(arm, len(MARKS))


def run(comparison: Comparison, arm: str, rng_seed: int) -> dict[str, Any]:
    """One arm with one rng seed: losses by mark, when it grew, and what was spent on what."""
    task = comparison.task
    env = MorphEnv(task, rng_seed=rng_seed)
    env.reset()
    space = env.action_space
    with one_thread():
        if arm.isdigit():
            marks = MARKS[: reach_of(comparison, arm, rng_seed)]
            ended = branches(task.with_trunk(int(arm)), None, rng_seed=rng_seed, marks=marks)
        else:
            ended = branches(task, CountingController(space, 1), rng_seed=rng_seed)
        answers = {branch.mark: branch.report for branch in ended}
        found = [answers[mark] for mark in MARKS if mark in answers]
        row: dict[str, Any] = {"arm": arm, "rng_seed": rng_seed, "losses": [a.test_loss for a in found]}
        row |= {"val_losses": [a.val_loss for a in found], "params": [a.params for a in found]}
        row |= {"flops": [a.flops for a in found]}
        if arm in SWEPT:
            first = tuple(mark / FINER for mark in MARKS[:2])
            finer = replace(task.with_trunk(int(arm)), horizon=FINER * task.horizon)
            early = {b.mark: b.report for b in branches(finer, None, rng_seed=rng_seed, marks=first)}
            row["early"] = [[early[mark].test_loss, early[mark].val_loss] for mark in first]
    return row


def sweep(rows: Sequence[Mapping[str, Any]]) -> dict[int, list[float]]:
    """What the best of the swept sizes reaches with a quarter of each mark, by rng seed."""
    found: dict[int, list[list[tuple[float, float]]]] = {}
    for row in rows:
        if row["arm"] in SWEPT and "early" in row:
            pairs = [(val, loss) for loss, val in row["early"]]
            pairs += list(zip(row["val_losses"], row["losses"], strict=True))[: len(MARKS) - 2]
            found.setdefault(row["rng_seed"], []).append(pairs)
    return {
        seed: [min(column)[1] for column in zip(*sizes, strict=True)]
        for seed, sizes in found.items()
        if [len(pairs) for pairs in sizes] == len(SWEPT) * [len(MARKS)]
    }


# --- regret ------------------------------------------------------------------------------------


def references(losses: Losses, sizes: Sequence[str]) -> list[str]:
    """The fixed size that is best at each mark on selection rng seeds."""
    chosen_on = {
        size: [run for seed, run in losses[size].items() if seed in SELECTION_SEEDS] for size in sizes
    }
    means = {size: np.mean(runs, axis=0) for size, runs in chosen_on.items() if runs}
    return [min(means, key=lambda size: means[size][mark]) for mark in range(len(MARKS))]


def worst_regrets(losses: Losses, arm: str, reference: Sequence[str], seeds: Sequence[int]) -> FloatArray:
    """Largest regret ``[draw]`` to the reference, over the marks that the arm has with all these seeds."""
    reach = min(len(losses[arm][seed]) for seed in seeds)
    own = np.array([losses[arm][seed][:reach] for seed in seeds])
    best = np.array([[losses[size][seed][m] for m, size in enumerate(reference[:reach])] for seed in seeds])
    return largest(regrets(own[None], best[None]), np.full(reach, True))


def table(comparison: Comparison, losses: Losses) -> str:
    """Mean test losses by mark and the largest regret of each arm, with 95 % intervals."""
    sizes = [arm for arm in losses if arm.isdigit()]
    reference = references(losses, sizes)
    reach = {arm: reach_of(comparison, arm, comparison.rng_seeds[0]) for arm in losses}
    known = [
        seed
        for seed in comparison.rng_seeds
        if all(len(losses[size].get(seed, ())) > m for m, size in enumerate(reference))
    ]
    tested = {
        arm: [seed for seed in known if len(runs.get(seed, ())) >= reach[arm]] for arm, runs in losses.items()
    }
    tested = {arm: seeds for arm, seeds in tested.items() if seeds}
    best = min(
        (size for size in sizes if size in tested),
        key=lambda size: worst_regrets(losses, size, reference, tested[size])[0],
    )
    budgets = [f"{mark * (comparison.task.budget or 0) / 1e12:.3g}" for mark in MARKS]
    lines = [
        f"| compute, TFLOP | {' | '.join(budgets)} | largest regret, % | of {best}'s | rng seeds |",
        "|---" * (len(MARKS) + 4) + "|",
    ]
    for arm, seeds in tested.items():
        means = np.mean([losses[arm][seed][: reach[arm]] for seed in seeds], axis=0)
        cells = [f"**{v:.3f}**" if arm == reference[m] else f"{v:.3f}" for m, v in enumerate(means)]
        cells += ["–"] * (len(MARKS) - len(cells))
        own = worst_regrets(losses, arm, reference, seeds)
        common = [seed for seed in seeds if seed in tested[best]]
        ratio = ""
        if common and not arm.isdigit():
            both = [worst_regrets(losses, name, reference, common) for name in (arm, best)]
            ratio = "{:.2f} ({:.2f} … {:.2f})".format(*interval(both[0] / both[1]))
        worth = "{:.2f} ({:.2f} … {:.2f})".format(*(100 * v for v in interval(own)))
        lines.append(f"| {arm} | {' | '.join(cells)} | {worth} | {ratio} | {len(seeds)} |")
    return (
        "\n".join(lines) + f"\n\nBest size at each mark on the selection rng seed: {', '.join(reference)}.\n"
    )


def beyond_training(comparison: Comparison, rows: Sequence[Mapping[str, Any]]) -> str:
    """What growth cost that was not training, at the last mark."""
    ends = [r["flops"][-1] for r in rows if r["arm"] == "counting" and r["rng_seed"] in comparison.rng_seeds]
    purposes = ("incubation", "counterfactual", "pruned_seeds")
    shares = {
        name: 100 * fmean(end[name] for end in ends) / (comparison.task.budget or 1) for name in purposes
    }
    told = ", ".join(f"{name.replace('_', ' ')} {share:.1f} %" for name, share in shares.items())
    return f"\nOf the budget of `counting`, beyond training: {told}. Charged to nobody: validation.\n"


def picture(comparison: Comparison, losses: Losses) -> str:
    """Loss over compute: every fixed size, and the run that grew."""
    task = comparison.task
    unit = "layers" if task.host == "gpt" else "blocks"
    labels = {mark * (task.budget or 0): f"{mark * (task.budget or 0) / 1e12:.3g} T" for mark in MARKS}
    curves = []
    for arm, runs in losses.items():
        kept = [runs[seed] for seed in comparison.rng_seeds if seed in runs]
        if kept and (arm.isdigit() or arm == "counting"):
            # Means need all of the rng seeds: a curve ends where one of its runs does.
            means = [fmean(column) for column in zip(*kept, strict=False)]
            name, look = (
                (f"{arm} {unit.rstrip('s') if arm == '1' else unit}", "thin")
                if arm.isdigit()
                else ("grown", "line")
            )
            curves.append(Curve(name, list(zip(labels, means, strict=False)), look))
    return Picture(draw_curves("Test loss over compute", "FLOP", labels, curves), [], [], "").standalone()


def main(name: str = "pycode_scaling", *arms: str) -> None:
    comparison = COMPARISONS[name]
    folder = Path(__file__).parent.parent / comparison.folder
    folder.mkdir(exist_ok=True)
    results = folder / "results.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = {
        (r["arm"], r["rng_seed"])
        for r in rows
        if len(r["losses"]) >= reach_of(comparison, r["arm"], r["rng_seed"])
    }
    known = [*map(str, comparison.sizes), "counting"]
    wanted = arms or known
    jobs = [(arm, seed) for seed in (*SELECTION_SEEDS[:1], *comparison.rng_seeds) for arm in wanted]
    for arm, seed in jobs:
        if (arm, seed) not in done:
            rows.append(run(comparison, arm, seed))
            print(arm, seed, [round(loss, 3) for loss in rows[-1]["losses"]], flush=True)
            with results.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    losses = {arm: {r["rng_seed"]: r["losses"] for r in rows if r["arm"] == arm} for arm in known}
    losses["sweep"] = sweep(list({(row["arm"], row["rng_seed"]): row for row in rows}.values()))
    losses = {arm: runs for arm, runs in losses.items() if runs}
    (folder / "table.md").write_text(table(comparison, losses) + beyond_training(comparison, rows))
    (folder / "picture.svg").write_text(picture(comparison, losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
