"""The same question at equal compute, with what 015-ingredients found to be right.

``run.py`` beside this file compares plans that incubate their seeds with networks that are whole from the
first minibatch on, both for 20 epochs: the second spend a tenth more. Here both spend 8.4 GFLOP, in 20 steps;
seeds take part from their birth, and the rate rests until the last fifth (WSD). The seeds of a convolutional
host are no copies: it has no two blocks alike. A GPT that grows by copies is in 015-ingredients.

Run with ``.venv/bin/python experiments/013-from-scratch/budgeted.py`` (about five CPU-minutes); it rewrites
budgeted.json and budgeted.md beside this file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from run import HERE, NETWORKS, RNG_SEEDS, TASK, plan, plant

from esper.karn.statistics import estimate, paired_difference
from esper.leyline import CANONICAL_ACTION, BlueprintAction
from esper.leyline.signals import EpochFacts
from esper.run.factories import one_thread
from esper.tamiyo import PeriodicController, parse_plan
from esper.tolaria.env import MorphEnv
from esper.tolaria.tasks import task_named

sys.path.insert(0, str(Path(__file__).parents[1]))
from cells import Cell

UNCHANGED = task_named(TASK)
BUDGETED = replace(
    UNCHANGED,
    budget=8_400 * 10**6,
    schedule="wsd",
    rules=replace(UNCHANGED.rules, min_training_epochs=0, enters_at_once=True),
)


def grown(arm: str, seeds: Mapping[int, BlueprintAction], rng_seed: int) -> Cell:
    """One episode in which a plan plants the seeds, one in each of the first steps."""
    env = MorphEnv(BUDGETED, rng_seed=rng_seed)
    facts, space = env.reset(), env.action_space
    controller = PeriodicController(space, parse_plan(plan(seeds), space))
    controller.reset(0)
    while not env.ended:
        facts = env.step(controller.decide(EpochFacts.stack([facts]), env.table).actions[0])
    return Cell.of(arm, rng_seed, env.finish())


def whole(arm: str, seeds: Mapping[int, BlueprintAction], rng_seed: int) -> Cell:
    """One episode in which the seeds are part of the network before it begins."""
    env = MorphEnv(BUDGETED, rng_seed=rng_seed)
    env.reset()
    plant(env, seeds)
    while not env.ended:
        env.step(CANONICAL_ACTION)
    return Cell.of(arm, rng_seed, env.finish())


def table(results: Mapping[str, Sequence[Cell]]) -> str:
    """Test scores, and how far the grown network lies above the whole one; ± is the 95 % interval."""
    lines = [
        "| network | grown | whole | grown above whole, paired | GFLOP of each |",
        "|---|---|---|---|---|",
    ]
    for name in NETWORKS:
        arms = [results[f"{name}; {how}"] for how in ("grown", "whole")]
        scores = [[cell.test_score for cell in cells] for cells in arms]
        charged = [
            sum(c.flops["forward"] + c.flops["backward"] for c in cells) / len(cells) for cells in arms
        ]
        spent = ", ".join(f"{flops / 1e9:.2f}" for flops in charged)
        lead = paired_difference(*scores)
        lines.append(f"| {name} | {estimate(scores[0])} | {estimate(scores[1])} | {lead} | {spent} |")
    return "\n".join(lines) + f"\n\n{len(RNG_SEEDS)} paired rng seeds.\n"


def main() -> None:
    results: dict[str, list[Cell]] = {}
    with one_thread():
        for name, seeds in NETWORKS.items():
            for how, run in (("grown", grown), ("whole", whole)):
                arm = f"{name}; {how}"
                results[arm] = [run(arm, seeds, rng_seed) for rng_seed in RNG_SEEDS]
    cells = [cell.as_dict() for cells in results.values() for cell in cells]
    (HERE / "budgeted.json").write_text(json.dumps(cells) + "\n")
    (HERE / "budgeted.md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
