"""The size is given: is a network of six layers cheaper to grow than to train whole?

A GPT of six layers, width 64, on Python's library, with a short budget B of 1.7 TFLOP (about 760 minibatches
of six layers). It is trained whole with B, or grown: one layer, of which five copies are planted one step
after the other, with 0.7 B or 0.8 B. The rate of the six layers is the best of three by validation loss on a
selection rng seed (arms ``select …``; those of six layers ran in 160 steps, not 80, of the same minibatches).
The grown arms have the preset's rate and grow after 0.55 of their compute, untuned.

Run with ``.venv/bin/python experiments/017-given-size/run.py [ARM …]`` (30 CPU-seconds for each arm and rng
seed); it goes on where it stopped and rewrites table.md beside this file.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from esper.karn.statistics import estimate, paired_difference
from esper.leyline.signals import EpochFacts
from esper.run.factories import one_thread
from esper.tamiyo import PeriodicController, parse_plan
from esper.tolaria.env import MorphEnv
from esper.tolaria.seeding import SELECTION_SEEDS, TEST_SEEDS
from esper.tolaria.tasks import TaskSpec, task_named

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
LAYERS, WIDTH, BUDGET, STEPS = 6, 64, 1_700 * 10**9, 80


class Arm(NamedTuple):
    """Share of the budget, rate, and the share of its own budget after which copies are planted."""

    share: float
    rate: float
    grown_after: float | None = None


SELECTION = {f"select static, rate {rate:g}": Arm(1.0, rate) for rate in (2e-3, 4e-3, 8e-3)} | {
    "select grown at 0.55, rate 0.004": Arm(0.7, 4e-3, 0.55)
}
ARMS = {
    "six layers, B": Arm(1.0, 8e-3),
    "grown, 0.7 B": Arm(0.7, 4e-3, 0.55),
    "grown, 0.8 B": Arm(0.8, 4e-3, 0.55),
}
RNG_SEEDS = TEST_SEEDS[1000:1005]


def task_of(arm: Arm) -> TaskSpec:
    task = task_named("pycode_scaling")
    trunk = LAYERS if arm.grown_after is None else 1
    distribution = replace(
        task.instances, widths=((WIDTH,) * (LAYERS - 1),), learning_rates=(arm.rate,), trunks=(trunk,)
    )
    return replace(task, budget=BUDGET, horizon=STEPS, instances=distribution).until(arm.share)


def run(name: str, rng_seed: int) -> dict[str, object]:
    """One arm with one rng seed."""
    arm = (SELECTION | ARMS)[name]
    task = task_of(arm)
    env = MorphEnv(task, rng_seed=rng_seed)
    facts = env.reset()
    with one_thread():
        if arm.grown_after is not None:
            first = round(arm.grown_after * task.horizon)
            plan = ",".join(f"stack@r0c{slot}:{first + slot}" for slot in range(LAYERS - 1))
            controller = PeriodicController(env.action_space, parse_plan(plan, env.action_space))
            controller.reset(0)
            while env.epoch < first + LAYERS:
                facts = env.step(controller.decide(EpochFacts.stack([facts]), env.table).actions[0])
        report = env.run_out()
    return {
        "arm": name,
        "rng_seed": rng_seed,
        "test_loss": report.test_loss,
        "val_loss": report.val_loss,
        "params": report.params,
        "flops": report.flops,
    }


def table(rows: list[dict[str, object]]) -> str:
    lines = ["| arm | test loss | above six layers with B | rng seeds |", "|---|---|---|---|"]
    losses = {
        name: {r["rng_seed"]: r["test_loss"] for r in rows if r["arm"] == name} for name in SELECTION | ARMS
    }
    whole = losses["six layers, B"]
    for name, found in losses.items():
        paired = [seed for seed in found if seed in whole] if name in ARMS else []
        lead = paired_difference([found[s] for s in paired], [whole[s] for s in paired]) if paired else None
        if found:
            difference = "" if lead is None else f"{lead.mean:+.4f} ± {lead.half_width:.4f}"
            lines.append(
                f"| {name} | {estimate(list(found.values())).mean:.4f} | {difference} | {len(found)} |"
            )
    return "\n".join(lines) + "\n"


def main(names: list[str]) -> None:
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {(row["arm"], row["rng_seed"]) for row in rows}
    jobs = [(name, seed) for name in SELECTION for seed in SELECTION_SEEDS[:1]]
    jobs += [(name, seed) for seed in RNG_SEEDS for name in ARMS]
    for name, seed in jobs:
        if (name, seed) not in done and (not names or name in names):
            rows.append(run(name, seed))
            print(name, seed, rows[-1]["test_loss"], flush=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    (HERE / "table.md").write_text(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
