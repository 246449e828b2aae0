"""A network that exists is to become better: go on, grow it, or train a larger one anew?

A GPT of one layer (``pycode_scaling``) was trained before, which nobody is charged for, the rate falling to
zero at the end: ``saturated`` with 1 TFLOP, ``unsaturated`` with 0.0625 TFLOP. Then there are 0.5 TFLOP for
the first and 0.125 TFLOP for the second, each in 40 steps: to go on with it; to plant a copy of its layer at
step 1, or when ``counting`` says so; to put low-rank seeds into all slots; or to train two layers anew, with
as much compute and with twice as much. By 014-anytime a second layer pays from about 0.4 TFLOP on: the first
host is past that, the second stays below.

Run with ``.venv/bin/python experiments/018-upgrade/run.py`` (20 CPU-seconds for each arm and rng seed, 5 if
the host is unsaturated); it goes on where it stopped and rewrites table.md beside this file.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from esper.karn.statistics import estimate, paired_difference
from esper.leyline import OP_GERMINATE, Controller, Head
from esper.leyline.signals import EpochFacts
from esper.run.factories import one_thread
from esper.tamiyo import CountingController, PeriodicController, parse_plan
from esper.tolaria.env import MorphEnv
from esper.tolaria.seeding import TEST_SEEDS
from esper.tolaria.tasks import TaskSpec, task_named

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
HOSTS = {"saturated": (1000, 500), "unsaturated": (62.5, 125)}
"""GFLOP that each was trained with, and that there are to make it better."""
STEPS = 40
LOW_RANK = ",".join(f"lora@r0c{slot}:{1 + slot}" for slot in range(5))
ARMS: dict[str, str | None] = {
    "continue": None,
    "a copy at step 1": "stack@r0c0:1",
    "counting": "",
    "low-rank seeds": LOW_RANK,
}
ANEW = {"two layers anew": 1, "two layers anew, twice the compute": 2}
PAIRS = [(host, arm) for host in HOSTS for arm in (*ARMS, *ANEW)]
RNG_SEEDS = TEST_SEEDS[1001:1006]


def task_of(gflops: float) -> TaskSpec:
    """The task with this budget."""
    return replace(task_named("pycode_scaling"), budget=round(gflops * 1e9), horizon=STEPS)


@cache
def trained(host: str, rng_seed: int) -> dict[str, Tensor]:
    """Weights of the host as its users have it."""
    env = MorphEnv(task_of(HOSTS[host][0]), rng_seed=rng_seed)
    env.reset()
    env.run_out()
    return {name: value.clone() for name, value in env.model.host.state_dict().items()}


def run(host: str, arm: str, rng_seed: int) -> dict[str, Any]:
    """One arm with one rng seed."""
    grew: list[int] = []
    budget = HOSTS[host][1]
    if arm in ANEW:
        env = MorphEnv(task_of(ANEW[arm] * budget).with_trunk(2), rng_seed=rng_seed)
        env.reset()
    else:
        weights, plan = trained(host, rng_seed), ARMS[arm]
        env = MorphEnv(task_of(budget), rng_seed=rng_seed)
        facts, space = env.reset(), env.action_space
        env.model.host.load_state_dict(weights)
        controller: Controller = CountingController(space, 1)
        if plan:
            controller = PeriodicController(space, parse_plan(plan, space))
        controller.reset(0)
        while plan is not None and env.epoch < 0.8 * STEPS:
            action = controller.decide(EpochFacts.stack([facts]), env.table).actions[0]
            grew += [env.epoch] * bool(action[Head.OP] == OP_GERMINATE)
            facts = env.step(action)
    report = env.run_out()
    row = {"host": host, "arm": arm, "rng_seed": rng_seed, "test_loss": report.test_loss, "grew": grew}
    return row | {"params": report.params, "flops": report.flops}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| host | arm | test loss | above continue, paired | grew at step | rng seeds |",
        "|---" * 6 + "|",
    ]
    kept = {(r["host"], r["arm"], r["rng_seed"]): r for r in rows}
    for host, arm in PAIRS:
        seeds = [s for s in RNG_SEEDS if (host, arm, s) in kept and (host, "continue", s) in kept]
        if seeds:
            losses = [kept[host, arm, seed]["test_loss"] for seed in seeds]
            lead = paired_difference(losses, [kept[host, "continue", seed]["test_loss"] for seed in seeds])
            grew = "; ".join(", ".join(map(str, kept[host, arm, seed]["grew"])) or "–" for seed in seeds)
            lines.append(
                f"| {host} | {arm} | {estimate(losses).mean:.4f} | {lead.mean:+.4f} ± {lead.half_width:.4f}"
                f" | {grew} | {len(seeds)} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {(row["host"], row["arm"], row["rng_seed"]) for row in rows}
    for job in [(*pair, seed) for seed in RNG_SEEDS for pair in PAIRS]:
        if job not in done:
            with one_thread():
                rows.append(run(*job))
            print(*job, rows[-1]["test_loss"], rows[-1]["grew"], flush=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    (HERE / "table.md").write_text(table(rows))


if __name__ == "__main__":
    main()
