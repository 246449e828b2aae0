"""One run that grows against every fixed size, at every budget.

Every run is charged in FLOPs and answers at six marks (1/32 … 1 of its budget): at 0.8 of a mark it is
copied, the copy's learning rate falls to zero, and the copy is tested at the mark. So an answer at a mark has
cost the mark, for fixed sizes and for networks that grow alike.

regret(mark) = mean over rng seeds of (loss − loss of the fixed size that was best there on a selection rng
seed) / the latter. An arm is worth its largest regret; intervals are by bootstrap over rng seeds, everything
recomputed. Sizes that are far off at small marks, and best at none, are run to a quarter of the budget only.
``sweep`` trains sizes 1 to 4 with a quarter of the mark each and takes the best by validation.

Run with ``.venv/bin/python experiments/014-anytime/run.py [TASK [ARM …]]`` (75 CPU-seconds for each arm and
rng seed); it goes on where it stopped and rewrites table.md and picture.svg. ``pycode_scaling`` is kept here,
``fashion_scaling`` in 016-images.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from esper.build import one_thread
from esper.karn.drawing import svg
from esper.karn.drawing.axes import Label, Scale, around, beside_lines, value_axis, y_axis
from esper.karn.drawing.picture import Picture
from esper.tamiyo import CountingController, PeriodicController, parse_plan
from esper.tolaria.anytime import MARKS, run_anytime
from esper.tolaria.env import MorphEnv
from esper.tolaria.seeding import SELECTION_SEEDS, TEST_SEEDS
from esper.tolaria.tasks import TaskSpec, task_named

FOLDERS = {"pycode_scaling": "014-anytime", "fashion_scaling": "016-images"}
SIZES = {"pycode_scaling": (1, 2, 3, 4, 5, 6), "fashion_scaling": (1, 2, 3, 4, 6, 8)}
PLANS = {"grown at 12, 72": "stack@r0c0:12,stack@r0c1:72"}
"""Copies of the last block, by the step before which each is planted: of 160 steps."""
RNG_SEEDS = TEST_SEEDS[1000:1005]
SHORT = {"pycode_scaling": ("4", "5", "6"), "fashion_scaling": ()}
"""Sizes that are run to a quarter of the budget only, but for selection."""
SWEPT = ("1", "2", "3", "4")
FINER = 4
"""For the sweep: the smallest marks have a quarter, in steps a quarter as long."""
Losses = Mapping[str, Mapping[int, Sequence[float]]]
"""Test losses by arm, rng seed and mark."""


def run(task: TaskSpec, arm: str, rng_seed: int) -> dict[str, Any]:
    """One arm with one rng seed: losses by mark, when it grew, and what was spent on what."""
    env = MorphEnv(task, rng_seed=rng_seed)
    env.reset()
    space = env.action_space
    with one_thread():
        if arm.isdigit():
            short = arm in SHORT[task.name] and rng_seed not in SELECTION_SEEDS
            marks = MARKS[:-2] if short else MARKS
            answers = run_anytime(task.with_trunk(int(arm)), None, rng_seed=rng_seed, marks=marks)
        elif arm in PLANS:
            controller = PeriodicController(space, parse_plan(PLANS[arm], space))
            answers = run_anytime(task, controller, rng_seed=rng_seed)
        else:
            answers = run_anytime(task, CountingController(space, 1), rng_seed=rng_seed)
        found = [answers[mark] for mark in MARKS if mark in answers]
        row: dict[str, Any] = {"arm": arm, "rng_seed": rng_seed, "losses": [a.test_loss for a in found]}
        row |= {"val_losses": [a.val_loss for a in found], "params": [a.params for a in found]}
        row |= {"flops": [a.flops for a in found]}
        if arm in SWEPT:
            first = tuple(mark / FINER for mark in MARKS[:2])
            finer = replace(task.with_trunk(int(arm)), horizon=FINER * task.horizon)
            early = run_anytime(finer, None, rng_seed=rng_seed, marks=first)
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
        if len(sizes) == len(SWEPT)
    }


# --- regret ------------------------------------------------------------------------------------


def references(losses: Losses, sizes: Sequence[str]) -> list[str]:
    """The fixed size that is best at each mark on selection rng seeds."""
    chosen_on = {
        size: [run for seed, run in losses[size].items() if seed in SELECTION_SEEDS] for size in sizes
    }
    means = {size: np.mean(runs, axis=0) for size, runs in chosen_on.items() if runs}
    return [min(means, key=lambda size: means[size][mark]) for mark in range(len(MARKS))]


def regrets(losses: Losses, arm: str, reference: Sequence[str], seeds: Sequence[int]) -> np.ndarray[Any, Any]:
    """``[rng seed, mark]``, as a share of the reference's loss, for the marks that the arm has."""
    own = np.array([losses[arm][seed] for seed in seeds])
    reached = reference[: own.shape[1]]
    return own / np.array([[losses[size][seed][m] for m, size in enumerate(reached)] for seed in seeds]) - 1.0


def resampled_maxima(regret: np.ndarray[Any, Any], samples: int = 10_000) -> np.ndarray[Any, Any]:
    """The largest mean regret in each bootstrap sample of rng seeds, the same samples for every arm."""
    drawn = np.random.default_rng(0).integers(len(regret), size=(samples, len(regret)))
    largest: np.ndarray[Any, Any] = regret[drawn].mean(axis=1).max(axis=1)
    return largest


def table(task: TaskSpec, losses: Losses) -> str:
    """Mean test losses by mark and the largest regret of each arm, with 95 % intervals."""
    sizes = [arm for arm in losses if arm.isdigit()]
    reference = references(losses, sizes)
    budgets = [f"{mark * (task.budget or 0) / 1e12:.3g}" for mark in MARKS]
    lines = [
        f"| compute, TFLOP | {' | '.join(budgets)} | largest regret, % | of the best size's | rng seeds |",
        "|---" * (len(MARKS) + 4) + "|",
    ]
    tested = {arm: sorted(seed for seed in runs if seed in TEST_SEEDS) for arm, runs in losses.items()}
    complete = [size for size in sizes if len(tested[size]) == max(map(len, tested.values()))]
    best = min(complete, key=lambda s: regrets(losses, s, reference, tested[s]).mean(axis=0).max())
    for arm, seeds in tested.items():
        if not seeds:
            continue
        means = np.mean([losses[arm][seed] for seed in seeds], axis=0)
        cells = [f"**{loss:.3f}**" if arm == reference[m] else f"{loss:.3f}" for m, loss in enumerate(means)]
        cells += ["–"] * (len(MARKS) - len(cells))
        own = regrets(losses, arm, reference, seeds)
        drawn = resampled_maxima(own)
        low, high = np.percentile(100 * drawn, (2.5, 97.5))
        ratio = ""
        if not arm.isdigit():
            others = resampled_maxima(regrets(losses, best, reference, seeds))
            r_low, r_high = np.percentile(drawn / others, (2.5, 97.5))
            exact = own.mean(axis=0).max() / regrets(losses, best, reference, seeds).mean(axis=0).max()
            ratio = f"{exact:.2f} ({r_low:.2f} … {r_high:.2f})"
        lines.append(
            f"| {arm} | {' | '.join(cells)} | {100 * own.mean(axis=0).max():.2f} ({low:.2f} … {high:.2f})"
            f" | {ratio} | {len(seeds)} |"
        )
    return "\n".join(lines) + f"\n\nBest size at each mark on selection rng seeds: {', '.join(reference)}.\n"


def picture(task: TaskSpec, losses: Losses) -> str:
    """Loss over compute: every fixed size, and the run that grew."""
    means = {
        arm: np.mean([runs[seed] for seed in runs if seed in TEST_SEEDS], axis=0)
        for arm, runs in losses.items()
        if (arm.isdigit() or arm == "counting") and any(seed in TEST_SEEDS for seed in runs)
    }
    low, high = around([float(v) for values in means.values() for v in values], 5)
    x, y = Scale(0, len(MARKS) - 1, 62.0, svg.WIDTH - 110.0), Scale(low, high, 300.0, 20.0)
    budgets = {m: f"{mark * (task.budget or 0) / 1e12:.3g}" for m, mark in enumerate(MARKS)}
    unit = "layers" if task.host == "gpt" else "blocks"
    lines = [
        svg.curve([(x(m), y(float(v))) for m, v in enumerate(values)], "thin" if arm.isdigit() else "line")
        for arm, values in means.items()
    ]
    labels = [
        Label(f"{arm} {unit}", y(float(values[-1])))
        if arm.isdigit()
        else Label("grown", y(float(values[-1])), "strong")
        for arm, values in means.items()
    ]
    drawn = svg.drawing(
        345.0,
        "Test loss over compute",
        "One run that grows follows the lower envelope of the fixed sizes",
        y_axis(y, x.start, x.stop),
        value_axis(x, 300.0, "TFLOP, log scale", {float(m): text for m, text in budgets.items()}),
        *lines,
        beside_lines(x.stop + 8, labels),
    )
    return Picture(drawn, [], [], "").standalone()


def main(name: str = "pycode_scaling", *arms: str) -> None:
    task, folder = task_named(name), Path(__file__).parent.parent / FOLDERS[name]
    results = folder / "results.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = {(row["arm"], row["rng_seed"]) for row in rows}
    known = [*map(str, SIZES[name]), "counting", *PLANS]
    wanted = arms or known
    jobs = [(arm, seed) for seed in (*SELECTION_SEEDS[:1], *RNG_SEEDS) for arm in wanted]
    for arm, seed in jobs:
        if (arm, seed) not in done:
            rows.append(run(task, arm, seed))
            print(arm, seed, [round(loss, 3) for loss in rows[-1]["losses"]], flush=True)
            with results.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    losses = {arm: {r["rng_seed"]: r["losses"] for r in rows if r["arm"] == arm} for arm in known}
    losses["sweep"] = sweep(rows)
    losses = {arm: runs for arm, runs in losses.items() if runs}
    (folder / "table.md").write_text(table(task, losses))
    (folder / "picture.svg").write_text(picture(task, losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
