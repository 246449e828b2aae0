"""Does the learned policy beat random and the heuristic on lives it has never seen?

Three trainings of each variant on digits_impaired, rng seeds 0 to 2. Each is judged by the policy that
did best on the selection rng seeds: argmax, test split, 20 rng seeds that neither training nor selection
has met.

Run with ``.venv/bin/python experiments/005-policy/run.py`` (a quarter of an hour per training on two
cores); name variants to run only those, or ``judge`` to judge what is there. Trainings go to runs/ below
this folder and are resumed when the script is started again. It rewrites trainings.json, results.json,
table.md and curves.svg.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from curves import draw_curves

from esper.karn.query import read_rows
from esper.karn.statistics import estimate, paired_difference
from esper.leyline import HEAD_NAMES
from esper.leyline.events import UpdateRow
from esper.study import Cell, run_study
from esper.tolaria.seeding import TEST_SEEDS

HERE = Path(__file__).parent
TASK = "digits_impaired"
RNG_SEEDS = (0, 1, 2)
LIVES = TEST_SEEDS[:20]
SHARED = ["--preset", "study"]
VARIANTS: dict[str, list[str]] = {
    "policy": [],
    "Q(s, op)": ["--critic", "op_value"],
    "independent heads": ["--no-conditioned"],
}
CONTROLS = ("heuristic", "random", "off")
KEPT = (
    "round",
    "mean_return",
    "val_score",
    "explained_variance",
    "head_entropy",
    "reward_variance",
    "reward_variance_unpaired",
    "evaluation_return",
    "evaluation_score",
)

Trainings = dict[str, dict[str, Any]]


def arm_of(variant: str, rng_seed: int) -> str:
    return f"{variant}, rng seed {rng_seed}"


def folder(variant: str, rng_seed: int) -> Path:
    name = "".join(letter if letter.isalnum() else "-" for letter in variant)
    return HERE / "runs" / f"{name}-{rng_seed}"


def train(variant: str, rng_seed: int) -> float:
    """Train, or go on with a training that was interrupted; returns the CPU minutes of this call."""
    run = folder(variant, rng_seed)
    began = _cpu_minutes()
    command = [str(Path(sys.executable).with_name("esper")), "train", "--processes", "2"]
    if (run / "config.json").exists():
        command += ["--resume", str(run)]
    else:
        command += ["--out", str(run), "--rng-seed", str(rng_seed), *SHARED, *VARIANTS[variant]]
    subprocess.run(command, check=True)
    return _cpu_minutes() - began


def _cpu_minutes() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) / 60


def train_all(variants: list[str], trainings: Trainings, kept: Path) -> None:
    for rng_seed in RNG_SEEDS:
        for variant in variants:
            arm = arm_of(variant, rng_seed)
            before = trainings.get(arm, {}).get("cpu_minutes", 0.0)
            minutes = before + train(variant, rng_seed)
            rows = read_rows(folder(variant, rng_seed), UpdateRow)
            rounds = [{name: getattr(row, name) for name in KEPT} for row in rows]
            trainings[arm] = {"cpu_minutes": minutes, "rounds": rounds}
            kept.write_text(json.dumps(trainings) + "\n")


def judge(trainings: Trainings) -> dict[str, list[Cell]]:
    """Every best policy and every control on the same unseen rng seeds."""
    arms: dict[str, dict[str, object]] = {name: {"task": TASK, "decider": name} for name in CONTROLS}
    for variant in VARIANTS:
        for rng_seed in RNG_SEEDS:
            if arm_of(variant, rng_seed) in trainings:
                checkpoint = folder(variant, rng_seed) / "best"
                arms[arm_of(variant, rng_seed)] = {"task": TASK, "decider": "ppo", "checkpoint": checkpoint}
    return run_study(arms, LIVES)


def table(results: dict[str, list[Cell]], trainings: Trainings) -> str:
    """Test scores with paired leads (± is the 95 % interval), and what the training looked like."""
    scores = {arm: [cell.test_score for cell in cells] for arm, cells in results.items()}
    lines = [
        "| decider | test score | above heuristic | above random | parameters | CPU min | best round |"
        " explained variance, last 5 | least blueprint entropy | least tempo entropy |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, cells in results.items():
        leads = [
            "" if arm == control else str(paired_difference(scores[arm], scores[control]))
            for control in ("heuristic", "random")
        ]
        params = sum(cell.params for cell in cells) / len(cells)
        course = _course(trainings[arm]) if arm in trainings else [""] * 5
        row = (arm, str(estimate(scores[arm])), *leads, f"{params:,.0f}", *course)
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _course(training: dict[str, Any]) -> list[str]:
    rounds = training["rounds"]
    evaluated = [row for row in rounds if row["evaluation_return"] is not None]
    best = max(evaluated, key=lambda row: row["evaluation_return"])
    explained = [row["explained_variance"] for row in rounds[-5:]]
    before_last_fifth = rounds[: len(rounds) * 4 // 5]

    def least(head: str) -> str:
        found = [row["head_entropy"][HEAD_NAMES.index(head)] for row in before_last_fifth]
        return f"{min(value for value in found if value is not None):.2f}"

    return [
        f"{training['cpu_minutes']:.0f}",
        str(best["round"]),
        f"{sum(explained) / len(explained):.2f}",
        least("blueprint"),
        least("tempo"),
    ]


def main() -> None:
    kept = HERE / "trainings.json"
    trainings: Trainings = json.loads(kept.read_text()) if kept.exists() else {}
    wanted = sys.argv[1:] or list(VARIANTS)
    if wanted != ["judge"]:
        train_all(wanted, trainings, kept)
    results = judge(trainings)
    cells = [cell.as_dict() for cells in results.values() for cell in cells]
    (HERE / "results.json").write_text(json.dumps({"settings": SHARED, "cells": cells}, indent=1) + "\n")
    (HERE / "table.md").write_text(table(results, trainings))
    (HERE / "curves.svg").write_text(draw_curves(trainings, results))
    print(table(results, trainings))


if __name__ == "__main__":
    main()
