"""Hosts trained in bfloat16 against the same hosts in float32, under the same actions.

For every rng seed the actions of a periodic plan are recorded in float32 and carried out again in both
precisions: same host, data, order of data and actions. Scores are of the committed network on the test split,
measured in float32 in both arms.

Run with ``.venv/bin/python experiments/023-bfloat16/run.py`` (one core; about half a minute for each rng seed
of ``pycode``); it goes on where it stopped and rewrites table.md beside this file.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.karn.statistics import estimate, paired_difference
from esper.leyline import EpochFacts
from esper.leyline.rows import EpochRow, Row
from esper.run.factories import one_thread
from esper.tamiyo import PeriodicController, parse_plan
from esper.tolaria.devices import DEFAULT_DEVICE, Amp, Compute
from esper.tolaria.env import MorphEnv
from esper.tolaria.seeding import TEST_SEEDS
from esper.tolaria.tasks import task_named

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
PLANS = {
    "digits": "conv_light@r0c0:0,conv_heavy@r0c1:3,attention@r0c2:6",
    "pycode": "mlp@r0c0:0,attention@r0c1:3,lora@r0c2:6",
}
RNG_SEEDS = {"digits": TEST_SEEDS[:20], "pycode": TEST_SEEDS[:5]}
"""As many as a half-width of two points takes, and some more."""
ARMS: tuple[Amp, ...] = ("off", "bfloat16")


class Epochs:
    """Keeps the rows of epochs."""

    def __init__(self) -> None:
        self.rows: list[EpochRow] = []

    def emit(self, row: Row) -> None:
        if isinstance(row, EpochRow):
            self.rows.append(row)


def record(task: str, rng_seed: int) -> NDArray[np.int64]:
    """The actions ``[step, 8]`` of the plan."""
    env = MorphEnv(task_named(task), rng_seed=rng_seed)
    facts = env.reset()
    controller = PeriodicController(env.action_space, parse_plan(PLANS[task], env.action_space))
    controller.reset(0)
    actions = []
    while not env.ended:
        actions.append(controller.decide(EpochFacts.stack([facts]), env.table).actions[0])
        facts = env.step(actions[-1])
    return np.stack(actions)


def replay(task: str, rng_seed: int, amp: Amp, actions: NDArray[np.int64]) -> dict[str, Any]:
    sink = Epochs()
    compute = Compute(DEFAULT_DEVICE, amp)
    env = MorphEnv(task_named(task), rng_seed=rng_seed, sink=sink, compute=compute)
    env.reset()
    for action in actions:
        env.step(action)
    report = env.finish()
    return {
        "task": task,
        "rng_seed": rng_seed,
        "arm": amp,
        "test_score": report.test_score,
        "test_loss": report.test_loss,
        "params": report.params,
        "rollbacks": report.rollbacks,
        "skipped": sum(row.skipped_batches for row in sink.rows),
        "finite": all(row.train_loss is not None and math.isfinite(row.val_loss) for row in sink.rows),
        "train_ms": sum(row.phase_ms["train"] for row in sink.rows),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| task | rng seeds | float32 | bfloat16 | bfloat16 ahead by | episodes not finite | training time |",
        "|---|---|---|---|---|---|---|",
    ]
    for task in PLANS:
        arms = {arm: [row for row in rows if (row["task"], row["arm"]) == (task, arm)] for arm in ARMS}
        scores = {arm: [row["test_score"] for row in found] for arm, found in arms.items()}
        if not scores["bfloat16"]:
            continue
        difference = paired_difference(scores["bfloat16"], scores["off"])
        low, high = difference.interval
        broken = sum(not row["finite"] or row["rollbacks"] + row["skipped"] > 0 for row in arms["bfloat16"])
        times = {arm: sum(row["train_ms"] for row in found) for arm, found in arms.items()}
        lines.append(
            f"| {task} | {difference.size} | {estimate(scores['off'])} | {estimate(scores['bfloat16'])} |"
            f" {difference.mean:+.2f} [{low:+.2f}, {high:+.2f}] | {broken} |"
            f" {times['bfloat16'] / times['off']:.2f} × |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {(row["task"], row["rng_seed"]) for row in rows}
    jobs = [(task, seed) for task, seeds in RNG_SEEDS.items() for seed in seeds if (task, seed) not in done]
    with one_thread():
        for task, rng_seed in jobs:
            actions = record(task, rng_seed)
            pair = [replay(task, rng_seed, arm, actions) for arm in ARMS]
            print(task, rng_seed, [round(row["test_score"], 2) for row in pair], flush=True)
            rows += pair
            with RESULTS.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in pair)
    (HERE / "table.md").write_text(table(rows))


if __name__ == "__main__":
    main()
