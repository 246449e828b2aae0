"""How much room is there above the heuristic? Fixed plans on digits_impaired, bare and after rent.

The rng seeds are of the training range: plans may be chosen by this table, and the policy study
(experiments/005-policy) judges the best of them with the others on rng seeds of its own.

Run with ``.venv/bin/python experiments/008-plans/run.py`` (about half an hour on two cores); it rewrites
results.json and table.md beside this file. Arms that results.json holds are not run again: remove it to begin
anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from esper.karn.statistics import estimate, paired_difference
from esper.run.run_config import TrainingConfig
from esper.tolaria.seeding import TRAINING_SEEDS

sys.path.insert(0, str(Path(__file__).parents[1]))
from cells import Cell, run_cells

HERE = Path(__file__).parent
RNG_SEEDS = TRAINING_SEEDS[7000:7024]
RENT = TrainingConfig.model_fields["rent"].default
HEAVY, LIGHT, DEPTHWISE, SMALL, NORM = "conv_heavy", "conv_light", "depthwise", "conv_small", "norm"
BOTTLENECK, ATTENTION = "bottleneck", "attention"
STYLES = ("sigmoid_add", "linear_multiply", "gated_gate")
ORDERS = ((0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1), (2, 0, 1))


def plan(
    slots: Sequence[int],
    *blueprints: str,
    styles: Sequence[str] = ("linear_add",),
    tempos: Sequence[str] = ("fast",),
) -> dict[str, object]:
    """One seed per step from step 0 on; a single blueprint, style or tempo stands for all."""
    choices = [
        entries * len(slots) if len(entries) == 1 else entries for entries in (blueprints, tempos, styles)
    ]
    entries = [
        f"{blueprint}/{tempo}/{style}@r0c{slot}:{step}"
        for step, (slot, blueprint, tempo, style) in enumerate(zip(slots, *choices, strict=True))
    ]
    return {"controller": "periodic", "plan": ",".join(entries)}


def named(slots: Sequence[int], *blueprints: str) -> str:
    return f"{', '.join(blueprints)} in {' '.join(map(str, slots))}"


def around(slots: Sequence[int], *blueprints: str) -> dict[str, dict[str, object]]:
    """A plan with one choice of one of its seeds changed, and with one style for all."""
    name, found = named(slots, *blueprints), {}
    for seed in range(len(slots)):

        def changed(usual: Sequence[str], choice: str, seed: int = seed) -> tuple[str, ...]:
            return (*usual[:seed], choice, *usual[seed + 1 :])

        for style in STYLES:
            styles = changed(("linear_add",) * len(slots), style)
            found[f"{name}; seed {seed + 1} {style}"] = plan(slots, *blueprints, styles=styles)
        tempos = changed(("fast",) * len(slots), "standard")
        found[f"{name}; seed {seed + 1} standard"] = plan(slots, *blueprints, tempos=tempos)
        found[f"{name}; seed {seed + 1} bottleneck"] = plan(slots, *changed(blueprints, BOTTLENECK))
    return found | {f"{name}; all {style}": plan(slots, *blueprints, styles=(style,)) for style in STYLES}


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
    ((1, 0, 2), (HEAVY, HEAVY, ATTENTION)),
    ((1, 2, 0), (HEAVY, LIGHT, HEAVY)),
    ((2, 0, 1), (LIGHT, HEAVY, HEAVY)),
    ((2, 1, 0), (LIGHT, HEAVY, HEAVY)),
    ((2, 1, 0), (LIGHT, HEAVY, LIGHT)),
    ((2, 1, 0), (DEPTHWISE, HEAVY, HEAVY)),
)
ARMS: dict[str, dict[str, object]] = {
    "heuristic": {"controller": "heuristic"},
    **{f"3 heavy in {' '.join(map(str, slots))}": plan(slots, HEAVY) for slots in ORDERS},
    **{
        f"3 heavy in {' '.join(map(str, slots))}, sigmoid ramp": plan(slots, HEAVY, styles=("sigmoid_add",))
        for slots in ORDERS[:3]
    },
    **{named(slots, *blueprints): plan(slots, *blueprints) for slots, blueprints in MIXED},
    **around((1, 0, 2), HEAVY, HEAVY, LIGHT),
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
    kept = HERE / "results.json"
    before = json.loads(kept.read_text()) if kept.exists() else []
    results: dict[str, list[Cell]] = {}
    for cell in before:
        results.setdefault(cell["arm"], []).append(Cell(**cell))
    settings = {arm: {"task": "digits_impaired", **own} for arm, own in ARMS.items() if arm not in results}
    results |= run_cells(settings, RNG_SEEDS)
    results = {arm: results[arm] for arm in ARMS}
    cells = [cell.as_dict() for cells in results.values() for cell in cells]
    kept.write_text(json.dumps(cells) + "\n")
    (HERE / "table.md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
