"""How should a new block begin? One thing at a time, paired.

``pycode_scaling`` with 0.5 TFLOP in 40 steps: one layer, of which a copy is planted before step 10 and
another before step 20. The base is what the presets do: a copy of weights and optimiser
moments, at full strength at once, under a rate that rests and then falls (WSD). Every other arm differs in
one thing; the last two do not grow: the network of the beginning, and that of the end, whole from the first
minibatch on.

Run with ``.venv/bin/python experiments/015-ingredients/run.py [ARM …]`` (20 CPU-seconds for each arm and rng
seed); it goes on where it stopped and rewrites table.md beside this file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from esper.karn.statistics import estimate, paired_difference
from esper.kasmina.hosts.transformer import Block
from esper.kasmina.slot import SeedSlot
from esper.leyline.signals import EpochFacts
from esper.run.factories import one_thread
from esper.tamiyo import PeriodicController, parse_plan
from esper.tolaria.env import MorphEnv
from esper.tolaria.seeding import TEST_SEEDS
from esper.tolaria.tasks import TaskSpec, task_named

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
PLAN = "stack/fast@r0c0:10,stack/fast@r0c1:20"
TASK = replace(task_named("pycode_scaling"), budget=500 * 10**9, horizon=40)
RNG_SEEDS = TEST_SEEDS[1001:1006]
TakeOver = Callable[[SeedSlot, nn.Module, Optimizer], None]
COPY: TakeOver = SeedSlot.take_over


def random(slot: SeedSlot, original: nn.Module, optimiser: Optimizer) -> None:
    """A block as a new network has it."""
    assert slot.seed is not None
    for module in slot.seed.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def zero_born(slot: SeedSlot, original: nn.Module, optimiser: Optimizer) -> None:
    """A random block whose two outputs are zero: the identity."""
    random(slot, original, optimiser)
    assert slot.seed is not None
    block: Block = slot.seed.block  # type: ignore[assignment]
    for layer in (block.attention.out, block.feed_forward[2]):
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)


def fresh_moments(slot: SeedSlot, original: nn.Module, optimiser: Optimizer) -> None:
    """A copy whose optimiser knows nothing."""
    COPY(slot, original, optimiser)
    assert slot.optimiser is not None
    slot.optimiser.state.clear()


RAMP = replace(TASK, rules=replace(TASK.rules, enters_at_once=False))
ARMS: dict[str, tuple[TaskSpec, TakeOver]] = {
    "base: copy, moments kept, at once, WSD": (TASK, COPY),
    "zero at birth": (TASK, zero_born),
    "random": (TASK, random),
    "fresh moments": (TASK, fresh_moments),
    "a ramp of 3 steps": (RAMP, COPY),
    "cosine": (replace(TASK, schedule="cosine"), COPY),
    "one layer": (TASK, COPY),
    "three layers": (TASK.with_trunk(3), COPY),
}
UNGROWN = ("one layer", "three layers")


def run(arm: str, rng_seed: int) -> dict[str, Any]:
    """One arm with one rng seed."""
    task, take_over = ARMS[arm]
    SeedSlot.take_over = take_over  # type: ignore[method-assign]
    env = MorphEnv(task, rng_seed=rng_seed)
    facts, space = env.reset(), env.action_space
    controller = PeriodicController(space, parse_plan(PLAN, space))
    controller.reset(0)
    with one_thread():
        while env.epoch < 25 and arm not in UNGROWN:
            facts = env.step(controller.decide(EpochFacts.stack([facts]), env.table).actions[0])
        report = env.run_out()
    row = {"arm": arm, "rng_seed": rng_seed, "test_loss": report.test_loss, "val_loss": report.val_loss}
    return row | {"params": report.params, "flops": report.flops}


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| arm | test loss | above the base, paired | rng seeds |", "|---|---|---|---|"]
    losses = {arm: {r["rng_seed"]: r["test_loss"] for r in rows if r["arm"] == arm} for arm in ARMS}
    base = losses[next(iter(ARMS))]
    for arm, found in losses.items():
        seeds = [seed for seed in found if seed in base]
        if seeds:
            own = [found[seed] for seed in seeds]
            lead = paired_difference(own, [base[seed] for seed in seeds])
            mean = estimate(own).mean
            lines.append(f"| {arm} | {mean:.4f} | {lead.mean:+.4f} ± {lead.half_width:.4f} | {len(seeds)} |")
    return "\n".join(lines) + "\n"


def main(names: list[str]) -> None:
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {(row["arm"], row["rng_seed"]) for row in rows}
    for arm, seed in [(arm, seed) for seed in RNG_SEEDS for arm in ARMS if not names or arm in names]:
        if (arm, seed) not in done:
            rows.append(run(arm, seed))
            print(arm, seed, rows[-1]["test_loss"], flush=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    (HERE / "table.md").write_text(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
