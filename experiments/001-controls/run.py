"""Does growth pay on digits_impaired, and does incubation? Every control, paired rng seeds.

Run with ``.venv/bin/python experiments/001-controls/run.py`` (about six minutes on two cores);
it rewrites results.json and table.md in this folder. Their two straight-through rows were measured with an
incubation that has been removed since; they are lost when the script is run again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from esper.karn.statistics import estimate, paired_difference
from esper.tolaria.seeding import TEST_SEEDS

sys.path.insert(0, str(Path(__file__).parents[1]))
from cells import Cell, run_cells

RNG_SEEDS = TEST_SEEDS[:10]
HERE = Path(__file__).parent


def three(seed: str, *steps: int) -> str:
    """The same seed in all three slots, at the given steps."""
    return ",".join(f"{seed}@r0c{slot}:{step}" for slot, step in enumerate(steps))


def periodic(plan: str, **settings: object) -> dict[str, object]:
    return {"controller": "periodic", "plan": plan, **settings}


HEAVY = three("conv_heavy/fast", 0, 1, 2)
ARMS: dict[str, dict[str, object]] = {
    "off": {"controller": "off"},
    "random": {"controller": "random"},
    "periodic: 3 heavy, steps 0-2": periodic(HEAVY),
    "periodic: 3 heavy, standard tempo": periodic(three("conv_heavy", 0, 1, 2)),
    "periodic: 3 heavy, steps 0, 4, 8": periodic(three("conv_heavy/fast", 0, 4, 8)),
    "periodic: 3 heavy, gated": periodic(three("conv_heavy/fast/gated_gate", 0, 1, 2)),
    "periodic: 3 light, steps 0-2": periodic(three("conv_light/fast", 0, 1, 2)),
    "periodic: 3 depthwise, steps 0-2": periodic(three("depthwise/fast", 0, 1, 2)),
    "periodic: 3 conv_small, steps 0-2": periodic(three("conv_small/fast", 0, 1, 2)),
    "periodic: 3 norm, steps 0-2": periodic(three("norm/fast", 0, 1, 2)),
    "periodic: 1 heavy in r0c1, step 0": periodic("conv_heavy/fast@r0c1:0"),
    "periodic: all blueprints in turn, every 3 steps": periodic("every:3"),
    "heuristic": {"controller": "heuristic"},
    "heuristic, no incubation": {"controller": "heuristic", "incubation_epochs": 0},
    "3 heavy, no incubation": periodic(HEAVY, incubation_epochs=0),
}


def table(results: Mapping[str, Sequence[Cell]]) -> str:
    """The arms as Markdown, best first within the order above; ± is the 95 % interval."""
    scores = {arm: [cell.test_score for cell in cells] for arm, cells in results.items()}
    lines = [
        "| arm | test score | paired: above off | paired: above heuristic | parameters | GFLOP |",
        "|---|---|---|---|---|---|",
    ]
    for arm, cells in results.items():
        params = sum(cell.params for cell in cells) / len(cells)
        compute = sum(sum(c.flops.values()) - c.flops["pruned_seeds"] for c in cells) / len(cells)
        above_off = "" if arm == "off" else str(paired_difference(scores[arm], scores["off"]))
        above_heuristic = (
            "" if arm == "heuristic" else str(paired_difference(scores[arm], scores["heuristic"]))
        )
        lines.append(
            f"| {arm} | {estimate(scores[arm])} | {above_off} | {above_heuristic}"
            f" | {params:,.0f} | {compute / 1e9:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    settings = {arm: {"task": "digits_impaired", "steps": 20, **own} for arm, own in ARMS.items()}
    results = run_cells(
        settings,
        RNG_SEEDS,
        on_cell=lambda cell: print(f"{cell.arm:<50} {cell.rng_seed} {cell.test_score:5.1f}", flush=True),
    )
    cells = [cell.as_dict() for cells in results.values() for cell in cells]
    (HERE / "results.json").write_text(json.dumps({"settings": settings, "cells": cells}, indent=1) + "\n")
    (HERE / "table.md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
