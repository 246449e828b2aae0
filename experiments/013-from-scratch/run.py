"""Is growing better than guessing right? The same networks, whole from the first minibatch on.

The best plans of experiments/008-plans say how large a network to grow. Here these networks are also trained
from scratch: the host and all seeds of a plan from the same first weights, at full alpha from the first
minibatch on, on the same data in the same order, for as many epochs. Nothing incubates, nothing is blended.

Run with ``.venv/bin/python experiments/013-from-scratch/run.py`` (about four minutes on two cores); it
rewrites results.json and table.md beside this file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from esper.karn.statistics import estimate, paired_difference
from esper.kasmina import lifecycle
from esper.leyline import CANONICAL_ACTION, BlueprintAction, Stage, Style
from esper.run.factories import one_thread
from esper.tolaria.env import MorphEnv
from esper.tolaria.seeding import TEST_SEEDS
from esper.tolaria.tasks import task_named

sys.path.insert(0, str(Path(__file__).parents[1]))
from cells import Cell, run_cells

HERE = Path(__file__).parent
TASK = "digits_impaired"
RNG_SEEDS = TEST_SEEDS[:20]
HEAVY, LIGHT = BlueprintAction.CONV_HEAVY, BlueprintAction.CONV_LIGHT
NETWORKS: dict[str, dict[int, BlueprintAction]] = {
    "3 heavy": {0: HEAVY, 1: HEAVY, 2: HEAVY},
    "heavy, heavy, light": {1: HEAVY, 0: HEAVY, 2: LIGHT},
}
"""Seeds by slot, in the order in which a plan grows them."""


def plan(seeds: Mapping[int, BlueprintAction]) -> str:
    """One seed per step from step 0 on."""
    return ",".join(
        f"{blueprint.name.lower()}/fast@r0c{slot}:{step}"
        for step, (slot, blueprint) in enumerate(seeds.items())
    )


def from_scratch(arm: str, seeds: Mapping[int, BlueprintAction], rng_seed: int) -> Cell:
    """One episode in which the seeds are part of the network before it begins."""
    env = MorphEnv(task_named(TASK), rng_seed=rng_seed)
    env.reset(0)
    plant(env, seeds)
    while not env.ended:
        env.step(CANONICAL_ACTION)
    return Cell.of(arm, rng_seed, env.finish())


def plant(env: MorphEnv, seeds: Mapping[int, BlueprintAction]) -> None:
    """Make the seeds part of the network, at full alpha."""
    model, table = env.model, env.table
    for number, (slot, blueprint) in enumerate(seeds.items()):
        params = model.germinate(slot, blueprint, Style.LINEAR_ADD)
        seed = lifecycle.Germination(number, blueprint, Style.LINEAR_ADD, 1.0, 3, params)
        env.host.count(lifecycle.germinate(table, 0, slot, seed, model.rules))
        table.stage[0, slot], table.alpha[0, slot] = Stage.FOSSILIZED, 1.0
    model.sync()


def table(results: Mapping[str, Sequence[Cell]]) -> str:
    """Test scores, and how far each network lies above the one that was grown; ± is the 95 % interval."""
    lines = ["| network | test score | above the grown one | parameters | GFLOP |", "|---|---|---|---|---|"]
    for arm, cells in results.items():
        name, _, how = arm.partition("; ")
        scores = [cell.test_score for cell in cells]
        grown = [cell.test_score for cell in results.get(f"{name}; grown", cells)]
        lead = str(paired_difference(scores, grown)) if how == "from scratch" else ""
        params = sum(cell.params for cell in cells) / len(cells)
        compute = sum(sum(c.flops.values()) - c.flops["pruned_seeds"] for c in cells) / len(cells) / 1e9
        lines.append(f"| {arm} | {estimate(scores)} | {lead} | {params:,.0f} | {compute:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    arms: dict[str, dict[str, object]] = {"heuristic": {"task": TASK, "controller": "heuristic"}}
    for name, seeds in NETWORKS.items():
        arms[f"{name}; grown"] = {"task": TASK, "controller": "periodic", "plan": plan(seeds)}
    results = run_cells(arms, RNG_SEEDS)
    with one_thread():
        for name, seeds in NETWORKS.items():
            arm = f"{name}; from scratch"
            results[arm] = [from_scratch(arm, seeds, rng_seed) for rng_seed in RNG_SEEDS]
    cells = [cell.as_dict() for cells in results.values() for cell in cells]
    (HERE / "results.json").write_text(json.dumps(cells) + "\n")
    (HERE / "table.md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
