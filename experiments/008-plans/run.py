"""How much room is there above the heuristic? Fixed plans on digits_impaired, bare and after rent.

The rng seeds are of the training range: plans may be chosen by this table, and the policy study
(experiments/005-policy) judges the best of them with the others on rng seeds of its own.

Run with ``.venv/bin/python experiments/008-plans/run.py`` (about twelve minutes on two cores); it rewrites
results.json and table.md beside this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from esper.config import TrainingConfig
from esper.karn.statistics import estimate, paired_difference
from esper.study import Cell, run_study
from esper.tolaria.seeding import TRAINING_SEEDS

HERE = Path(__file__).parent
RNG_SEEDS = TRAINING_SEEDS[7000:7024]
RENT = TrainingConfig.model_fields["rent"].default
HEAVY, LIGHT, DEPTHWISE, SMALL, NORM = "conv_heavy", "conv_light", "depthwise", "conv_small", "norm"
ORDERS = ((0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1), (2, 0, 1))


def plan(slots: Sequence[int], *blueprints: str, style: str = "linear_add") -> dict[str, object]:
    """One seed per step from step 0 on; a single blueprint stands for all."""
    seeds = blueprints * len(slots) if len(blueprints) == 1 else blueprints
    entries = [
        f"{seed}/fast/{style}@r0c{slot}:{step}"
        for step, (slot, seed) in enumerate(zip(slots, seeds, strict=True))
    ]
    return {"decider": "periodic", "plan": ",".join(entries)}


def named(slots: Sequence[int], *blueprints: str) -> str:
    return f"{', '.join(blueprints)} in {' '.join(map(str, slots))}"


MIXED = (
    ((0, 1, 2), (HEAVY, HEAVY, LIGHT)),
    ((1, 0, 2), (HEAVY, HEAVY, LIGHT)),
    ((0, 1, 2), (LIGHT, HEAVY, HEAVY)),
    ((1, 0, 2), (LIGHT, HEAVY, LIGHT)),
    ((0, 1, 2), (LIGHT, LIGHT, LIGHT)),
    ((0, 1, 2), (HEAVY, HEAVY, DEPTHWISE)),
    ((1, 0, 2), (HEAVY, HEAVY, DEPTHWISE)),
    ((1, 0, 2), (HEAVY, HEAVY, SMALL)),
    ((1, 0, 2), (HEAVY, HEAVY, NORM)),
    ((1, 0), (HEAVY, HEAVY)),
)
ARMS: dict[str, dict[str, object]] = {
    "heuristic": {"decider": "heuristic"},
    **{f"3 heavy in {' '.join(map(str, slots))}": plan(slots, HEAVY) for slots in ORDERS},
    **{
        f"3 heavy in {' '.join(map(str, slots))}, sigmoid ramp": plan(slots, HEAVY, style="sigmoid_add")
        for slots in ORDERS[:3]
    },
    **{named(slots, *blueprints): plan(slots, *blueprints) for slots, blueprints in MIXED},
}


def table(results: Mapping[str, Sequence[Cell]]) -> str:
    """Test scores and paired leads over the heuristic, bare and after rent; ± is the 95 % interval."""
    lines = [
        "| plan | test score | above heuristic | parameters | after rent | after rent, above heuristic |",
        "|---|---|---|---|---|---|",
    ]
    for arm, cells in results.items():
        columns = []
        for rent in (0.0, RENT):
            scores = [cell.after_rent(rent) for cell in cells]
            control = [cell.after_rent(rent) for cell in results["heuristic"]]
            lead = "" if arm == "heuristic" else str(paired_difference(scores, control))
            columns.append(f"{estimate(scores)} | {lead}")
        params = sum(cell.params for cell in cells) / len(cells)
        lines.append(f"| {arm} | {columns[0]} | {params:,.0f} | {columns[1]} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    settings = {arm: {"task": "digits_impaired", **own} for arm, own in ARMS.items()}
    results = run_study(settings, RNG_SEEDS)
    cells = [cell.as_dict() for cells in results.values() for cell in cells]
    (HERE / "results.json").write_text(json.dumps(cells, indent=1) + "\n")
    (HERE / "table.md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
