"""Does growth pay on other data and on text? Every control, 5 paired rng seeds per task.

Run with ``.venv/bin/python experiments/012-tasks/run.py`` (about ten minutes on two cores); it rewrites
results.json and table.md beside this file. Tasks may be named, to run only those. Fashion-MNIST must be
installed (docs/data.md).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esper.karn.statistics import estimate, paired_difference
from esper.tolaria.seeding import TEST_SEEDS

sys.path.insert(0, str(Path(__file__).parents[1]))
from cells import Cell, run_cells

HERE = Path(__file__).parent
RNG_SEEDS = TEST_SEEDS[:5]
PLANS = {
    "fashion14_impaired": "every:1:conv_heavy/fast",
    "fashion14": "every:1:conv_heavy/fast",
    "pycode": "every:1:mlp/fast",
}


def arms_of(task: str) -> dict[str, dict[str, object]]:
    return {
        "off": {"task": task, "controller": "off"},
        "random": {"task": task, "controller": "random"},
        f"periodic: {PLANS[task]}": {"task": task, "controller": "periodic", "plan": PLANS[task]},
        "heuristic": {"task": task, "controller": "heuristic"},
    }


def rows(task: str, results: Mapping[str, Sequence[Cell]]) -> list[str]:
    off = [cell.test_score for cell in results["off"]]
    found = []
    for arm, cells in results.items():
        scores = [cell.test_score for cell in cells]
        lead = "" if arm == "off" else str(paired_difference(scores, off))
        params = sum(cell.params for cell in cells) / len(cells)
        found.append(f"| {task} | {arm} | {estimate(scores)} | {lead} | {params:,.0f} |")
    return found


def main() -> None:
    kept = HERE / "results.json"
    results: dict[str, list[dict[str, Any]]] = json.loads(kept.read_text()) if kept.exists() else {}
    for task in sys.argv[1:] or PLANS:
        found = run_cells(arms_of(task), RNG_SEEDS)
        results[task] = [cell.as_dict() for cells in found.values() for cell in cells]
        print("\n".join(rows(task, found)), flush=True)
    kept.write_text(json.dumps(results, indent=1) + "\n")
    lines = ["| task | arm | test score | above off | parameters |", "|---|---|---|---|---|"]
    for task in PLANS:
        if task in results:
            cells = [Cell(**cell) for cell in results[task]]
            lines += rows(task, {arm: [c for c in cells if c.arm == arm] for arm in arms_of(task)})
    (HERE / "table.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
