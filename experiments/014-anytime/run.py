"""One run that grows against every fixed size, at every budget: character GPTs on Python's library.

Every run is paid in FLOPs, up to 2 TFLOP, and answers at six marks (1/32 … 1 of it): at 0.8 of a mark it is
copied, the copy's learning rate falls to zero, and the copy is tested at the mark. So an answer at a mark has
cost exactly the mark, for fixed sizes and for networks that grow alike.

regret(mark) = (loss − loss of the fixed size that is best there) / the latter, of means over rng seeds.

Run with ``.venv/bin/python experiments/014-anytime/run.py [ARM …]`` (about five minutes of one core for each
arm and rng seed); it goes on where it stopped and rewrites table.md beside this file.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean

from esper.build import one_thread
from esper.leyline import Controller
from esper.tamiyo import CountingController, PeriodicController, parse_plan
from esper.tolaria.anytime import MARKS, run_anytime
from esper.tolaria.env import MorphEnv
from esper.tolaria.tasks import task_named

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
TASK = task_named("pycode_scaling")
SIZES = (1, 2, 3, 4, 5, 6)
PLANS = {
    "grown at 12, 72": "stack@r0c0:12,stack@r0c1:72",
    "grown at 8, 40, 96": "stack@r0c0:8,stack@r0c1:40,stack@r0c2:96",
}
"""Copies of the last block, by the step before which each is planted: step 12 is after 0.15 TFLOP."""
ARMS: dict[str, str | None] = {**{f"{size} layers": None for size in SIZES}, "counting": "", **PLANS}
RNG_SEEDS = (0, 1, 2)


def run(arm: str, rng_seed: int) -> dict[str, object]:
    """One arm with one rng seed: test losses by mark, and what was spent on what."""
    with one_thread():
        plan = ARMS[arm]
        task = TASK.with_trunk(int(arm.split(maxsplit=1)[0])) if plan is None else TASK
        controller: Controller | None = None
        if plan is not None:
            env = MorphEnv(task, rng_seed=rng_seed)
            env.reset()
            space = env.action_space
            controller = (
                PeriodicController(space, parse_plan(plan, space)) if plan else CountingController(space, 1)
            )
        answers = run_anytime(task, controller, rng_seed=rng_seed)
    return {
        "arm": arm,
        "rng_seed": rng_seed,
        "losses": [answers[mark].test_loss for mark in MARKS],
        "params": [answers[mark].params for mark in MARKS],
        "flops": [answers[mark].flops for mark in MARKS],
    }


def table(results: Mapping[str, Mapping[int, list[float]]]) -> str:
    """Mean test losses by mark, the best fixed size of each in bold, and the largest regret of each arm."""
    means = {
        arm: [fmean(column) for column in zip(*runs.values(), strict=True)] for arm, runs in results.items()
    }
    fixed = [losses for arm, losses in means.items() if ARMS[arm] is None]
    best = [min(column) for column in zip(*fixed, strict=True)]
    budgets = [f"{mark * (TASK.budget or 0) / 1e12:g}" for mark in MARKS]
    lines = [f"| compute, TFLOP | {' | '.join(budgets)} | largest regret | rng seeds |"]
    lines.append("|---" * (len(MARKS) + 3) + "|")
    for arm, losses in means.items():
        cells = [
            f"**{loss:.3f}**" if loss <= least else f"{loss:.3f}"
            for loss, least in zip(losses, best, strict=True)
        ]
        regret = max(loss / least - 1.0 for loss, least in zip(losses, best, strict=True))
        lines.append(f"| {arm} | {' | '.join(cells)} | {100 * regret:.1f} % | {len(results[arm])} |")
    return "\n".join(lines) + "\n"


def main(arms: list[str]) -> None:
    kept = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {(row["arm"], row["rng_seed"]) for row in kept}
    jobs = [(arm, seed) for seed in RNG_SEEDS for arm in arms if (arm, seed) not in done]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run, *job) for job in jobs]):
            row = future.result()
            kept.append(row)
            print(row["arm"], row["rng_seed"], [round(loss, 3) for loss in row["losses"]], flush=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
    results: dict[str, dict[int, list[float]]] = {}
    for arm in ARMS:
        runs = {row["rng_seed"]: row["losses"] for row in kept if row["arm"] == arm}
        if runs:
            results[arm] = dict(sorted(runs.items()))
    (HERE / "table.md").write_text(table(results))


if __name__ == "__main__":
    main(sys.argv[1:] or list(ARMS))
