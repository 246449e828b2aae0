"""Does the answer depend on the budget, or on the learning rate? One selection rng seed each.

``pycode_scaling`` has 2 TFLOP, whose smallest mark holds 95 minibatches of six layers; with 4.2 TFLOP it
holds 200. And its rate is 0.004 for all sizes; with 0.008, which suits small budgets better, all arms are run
again. Rates of 0.002, 0.004 and 0.008 are compared by size up to 1/8 of the larger budget.

Run with ``.venv/bin/python experiments/014-anytime/wider.py`` (75 to 200 CPU-seconds for each arm, 20 for a
rate); it goes on where it stopped and rewrites wider.md beside this file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from run import COMPARISONS, MARKS

from esper.run.factories import one_thread
from esper.tamiyo import CountingController
from esper.tolaria.budget_marks import branches
from esper.tolaria.env import MorphEnv
from esper.tolaria.seeding import SELECTION_SEEDS
from esper.tolaria.tasks import task_named

HERE = Path(__file__).parent
TASK, RNG_SEED = task_named("pycode_scaling"), SELECTION_SEEDS[0]
LONG, SHORT, REACH = 4_200 * 10**9, 2_000 * 10**9, 3
SIX = [str(size) for size in COMPARISONS[TASK.name].sizes]


class Job(NamedTuple):
    """One run: a size or ``counting``, and how many marks it is run for."""

    budget: int
    rate: float
    arm: str
    reach: int = len(MARKS)


JOBS = [
    *(Job(LONG, 0.004, arm) for arm in (*SIX, "counting")),
    *(Job(SHORT, 0.008, arm) for arm in (*SIX[:4], "counting")),
    *(Job(LONG, rate, size, REACH) for size in SIX for rate in (0.002, 0.008)),
]


def run(job: Job) -> list[float]:
    """Test losses by mark."""
    task = replace(TASK, budget=job.budget, instances=replace(TASK.instances, learning_rates=(job.rate,)))
    env = MorphEnv(task, rng_seed=RNG_SEED)
    env.reset()
    grows = job.arm == "counting"
    controller = CountingController(env.action_space, 1) if grows else None
    task = task if grows else task.with_trunk(int(job.arm))
    with one_thread():
        found = list(branches(task, controller, rng_seed=RNG_SEED, marks=MARKS[: job.reach]))
    return [branch.report.test_loss for branch in found]


def table(found: dict[Job, list[float]], budget: int, rate: float) -> str:
    """Losses by mark; the regret of growing is against the best size at each mark, in hindsight."""
    rows = {
        job.arm: losses for job, losses in found.items() if job[:2] == (budget, rate) and len(losses) == 6
    }
    best = [min(column) for column in zip(*(rows[arm] for arm in rows if arm != "counting"), strict=True)]
    head = [f"{mark * budget / 1e12:.3g}" for mark in MARKS]
    lines = [_row(["compute, TFLOP", *head]), "|---" * 7 + "|"]
    for arm, losses in rows.items():
        lines.append(_row([arm, *(f"{loss:.3f}" for loss in losses)]))
    above = [100 * (own / other - 1) for own, other in zip(rows["counting"], best, strict=True)]
    lines.append(_row(["regret of counting, %", *(f"{value:.1f}" for value in above)]))
    return f"Rate {rate:g}\n\n" + "\n".join(lines)


def rates(found: dict[Job, list[float]]) -> str:
    """Losses at the last mark that all rates were run for."""
    wanted = (0.002, 0.004, 0.008)
    lines = [_row(["layers", *map(str, wanted)]), "|---" * 4 + "|"]
    for size in SIX:
        by_rate = {
            job.rate: losses for job, losses in found.items() if job.arm == size and job.budget == LONG
        }
        lines.append(_row([size, *(f"{by_rate[rate][REACH - 1]:.3f}" for rate in wanted)]))
    return f"Test loss at {MARKS[REACH - 1] * LONG / 1e12:.3g} TFLOP by rate\n\n" + "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    file = HERE / "wider.jsonl"
    rows: list[dict[str, Any]] = (
        [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    )
    found = {Job(*row["job"]): row["losses"] for row in rows}
    for job in JOBS:
        if job not in found:
            found[job] = run(job)
            print(job, [round(loss, 3) for loss in found[job]], flush=True)
            with file.open("a") as out:
                out.write(json.dumps({"job": job, "losses": found[job]}) + "\n")
    parts = [table(found, LONG, 0.004), table(found, SHORT, 0.008), rates(found)]
    (HERE / "wider.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
