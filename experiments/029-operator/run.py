"""What should growth do to the trained blocks, and to the new one? All arms of a family use equal FLOPs.

A network of one residual block grows a second one at 12.5 % or at 35 % of its budget (constant rate, then a
decay). The arms of a family and rng seed share the training up to the growth.

Run with ``.venv/bin/python experiments/029-operator/run.py [RNG_SEEDS]``; RNG_SEEDS is their number. The
script continues where it stopped and writes table.md into its folder.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from families import families
from table import write_table
from torch import nn

from esper.kasmina.birth import Births
from esper.kasmina.renewal import renew
from esper.leyline import CANONICAL_ACTION, EnvFacts
from esper.leyline.factored_actions import IntArray
from esper.run.factories import one_thread
from esper.tolaria.env import MorphEnv
from esper.tolaria.plan_tree import run_plans
from esper.tolaria.seeding import SELECTION_SEEDS
from esper.tolaria.tasks import TaskSpec

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
RNG_SEEDS = SELECTION_SEEDS[2600:2605]
EARLY, LATE = 5, 14  # of 40 steps


class Arm(NamedTuple):
    """Treatment of the trained part and of the new block at the step of growth."""

    grows: bool = True
    zero: bool = True
    """Whether the output projections of the copy start at zero."""
    moments: bool = True
    """Whether the copy gets the moments of its source."""
    renew: float = 1.0
    """Share of the trained values in the matrices of the old blocks; the rest is fresh."""
    everywhere: bool = False
    """Whether the matrices outside of the blocks are renewed, too."""
    forgets: bool = False
    """Whether the old blocks lose their moments."""
    warms: bool = False
    """Whether the learning rate of the whole network rises again from zero, over 60 minibatches."""


CORE = {
    "zero-born": Arm(),
    "copy": Arm(zero=False),
    "zero-born, renew 0.6": Arm(renew=0.6),
    "copy, renew 0.6": Arm(zero=False, renew=0.6),
    "renew 0.6 without growth": Arm(grows=False, renew=0.6),
}
LATER = ("zero-born", "zero-born, renew 0.6")
"""Arms that are also run at the later time of growth."""
EXTRA = {
    "zero-born, renew 0.8": Arm(renew=0.8),
    "zero-born, renew 0.4": Arm(renew=0.4),
    "zero-born, renew 0.6 everywhere": Arm(renew=0.6, everywhere=True),
    "zero-born, renew 0.6, old moments dropped": Arm(renew=0.6, forgets=True),
    "zero-born, renew 0.6, rate re-warmed": Arm(renew=0.6, warms=True),
    "zero-born, fresh moments": Arm(moments=False),
    "zero-born, rate re-warmed": Arm(warms=True),
}
ARMS = CORE | EXTRA


def decide(env: MorphEnv, name: str) -> IntArray:
    """Treat the trained part as the arm demands, and return the action that grows a block."""
    arm, host = ARMS[name], env.model.host
    kind = type(host).block_kind
    blocks = [module for module in host.modules() if isinstance(module, kind)]
    inside = {module for block in blocks for module in block.modules()}
    if arm.forgets:
        for block in blocks:
            for parameter in block.parameters():
                env.host.optimiser.state.pop(parameter, None)
    if arm.everywhere:
        layers = (nn.Linear, nn.Conv2d)
        outside = [m for m in host.modules() if isinstance(m, layers) and m not in inside]
        if outside:
            with env.model.slots[0].draws():
                renew(outside, arm.renew)
    if arm.warms:
        env.host.minibatches = 0
    if not arm.grows:
        with env.model.slots[0].draws():
            renew(blocks, arm.renew)
        return CANONICAL_ACTION.copy()
    env.model.births = Births(arm.zero, arm.moments, arm.renew)
    return env.action_space.action("germinate", slot="r0c0", blueprint="stack")[0]


def episodes(task: TaskSpec, rng_seed: int, stage: str) -> Iterator[dict[str, Any]]:
    """Yield a row for every arm of a stage."""
    env = MorphEnv(task, rng_seed=rng_seed)
    env.reset()
    plans: list[tuple[tuple[int, str], ...]] = [((EARLY, name),) for name in ARMS]
    if stage == "deeper":
        plans = [()]
    elif stage == "core":
        plans = [(), *(((EARLY, name),) for name in CORE), *(((LATE, name),) for name in LATER)]
    else:
        plans = [((EARLY, name),) for name in EXTRA]
    losses: dict[Any, list[tuple[int, float]]] = {}

    def after_step(done: Any, facts: EnvFacts) -> None:
        losses.setdefault(done, []).append((facts.epoch, facts.val_loss))

    for plan, report in run_plans(env, plans, decide, after_step):
        [(step, arm)] = plan or [(None, "deeper from the start" if stage == "deeper" else "never")]
        if report.params == report.host_params and plan and ARMS[arm].grows:
            raise RuntimeError(f"the block of '{arm}' was removed again")
        yield {
            "arm": arm,
            "at": step,
            "val_loss": report.val_loss,
            "test_loss": report.test_loss,
            "rollbacks": report.rollbacks,
            "params": report.params,
            "flops": report.flops["forward"] + report.flops["backward"],
            "curve": [round(loss, 5) for _, loss in losses[plan]],
        }


def main() -> None:
    rng_seeds = RNG_SEEDS[: int(sys.argv[1])] if len(sys.argv) > 1 else RNG_SEEDS
    tasks = {"core": families(), "deeper": families(blocks=2), "extra": families()}
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {(row["family"], row["rng_seed"], row["stage"]) for row in rows}
    first, rest = rng_seeds[:3], rng_seeds[3:]
    order = [(seed, stage) for seed in first for stage in ("core", "deeper")]
    order += [(seed, "extra") for seed in first[:2]]
    order += [(seed, stage) for seed in rest for stage in ("core", "deeper")]
    order += [(seed, "extra") for seed in rng_seeds[2:]]
    for rng_seed, stage in order:
        for family, task in tasks[stage].items():
            key = {"family": family, "rng_seed": rng_seed, "stage": stage}
            if tuple(key.values()) in done:
                continue
            began = time.process_time()
            new = [key | row for row in episodes(task, rng_seed, stage)]
            seconds = time.process_time() - began
            # All rows of a cell are written at once, so that an interrupted cell is repeated as a whole.
            with RESULTS.open("a") as file:
                file.write("".join(json.dumps(row) + "\n" for row in new))
            rows += new
            print(rng_seed, stage, family, f"{seconds:.0f} s", flush=True)
            for row in new:
                print("   ", row["arm"], row["at"], f"{row['test_loss']:.4f}", row["rollbacks"], flush=True)
        write_table(rows, HERE / "table.md")


if __name__ == "__main__":
    with one_thread():
        main()
