"""Does the learned policy beat random and the heuristic on episodes it has never seen?

Three trainings on digits_impaired, rng seeds 0 to 2. Each is judged by the policy that did best on the
selection rng seeds: argmax, test split, 20 rng seeds that neither training nor selection nor an earlier
evaluation has met. Two episodes under one plan may end thirty points apart, so every rng seed has ten
episodes, and its score is their mean: intervals are over 20 independent means. Beside the policies stand
the controls and the fixed plans that did best in experiments/008-plans, bare and after rent.

Run with ``.venv/bin/python experiments/005-policy/run.py`` (an hour and three quarters on two cores, two
fifths of it for judging), or with ``judge`` to judge the trainings that are there. Trainings go to runs/
below this folder and are resumed when the script is started again. It rewrites trainings.json, results.json,
table.md, first-episodes.md (one episode for each rng seed), courses.md and curves.svg. The files earlier-*.md
are from judging the same policies on other rng seeds, one episode each (commit 8b27b50).
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from curves import draw_curves

from esper.karn.run import read_rows
from esper.karn.statistics import estimate, paired_difference
from esper.leyline import HEAD_NAMES
from esper.leyline.rows import UpdateRow
from esper.run.run_config import training_config
from esper.tolaria.seeding import TEST_SEEDS

sys.path.insert(0, str(Path(__file__).parents[1]))
from cells import Cell, means_by_rng_seed, run_cells

HERE = Path(__file__).parent
TASK = "digits_impaired"
PRESET = "study"
RNG_SEEDS = (0, 1, 2)
UNSEEN = TEST_SEEDS[100:120]
"""Earlier judgements used the first hundred."""
EPISODES_EACH = 10
RENT = training_config(PRESET, {}, {}).rent
PLANS = {
    "3 heavy in 0 1 2": "conv_heavy/fast@r0c0:0,conv_heavy/fast@r0c1:1,conv_heavy/fast@r0c2:2",
    "heavy, heavy, light in 1 0 2": "conv_heavy/fast@r0c1:0,conv_heavy/fast@r0c0:1,conv_light/fast@r0c2:2",
    "light, heavy, heavy in 2 1 0": "conv_light/fast@r0c2:0,conv_heavy/fast@r0c1:1,conv_heavy/fast@r0c0:2",
}
CONTROLS = ("off", "random", "heuristic")
KEPT = (
    "iteration",
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


def arm_of(rng_seed: int) -> str:
    return f"rng seed {rng_seed}"


def folder(rng_seed: int) -> Path:
    return HERE / "runs" / f"policy-{rng_seed}"


def train(rng_seed: int) -> float:
    """Train, or go on with a training that was interrupted; returns the CPU minutes of this call."""
    run = folder(rng_seed)
    began = _cpu_minutes()
    command = [str(Path(sys.executable).with_name("esper")), "train", "--processes", "2"]
    if (run / "config.json").exists():
        command += ["--resume", str(run)]
    else:
        command += ["--preset", PRESET, "--rng-seed", str(rng_seed), "--out", str(run)]
    subprocess.run(command, check=True)
    return _cpu_minutes() - began


def _cpu_minutes() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) / 60


def train_all(trainings: Trainings, kept: Path) -> None:
    for rng_seed in RNG_SEEDS:
        before = trainings.get(arm_of(rng_seed), {}).get("cpu_minutes", 0.0)
        minutes = before + train(rng_seed)
        rows = read_rows(folder(rng_seed), UpdateRow)
        iterations = [{name: getattr(row, name) for name in KEPT} for row in rows]
        trainings[arm_of(rng_seed)] = {"cpu_minutes": minutes, "iterations": iterations}
        kept.write_text(json.dumps(trainings) + "\n")


def judge(trainings: Trainings) -> dict[str, list[Cell]]:
    """Every control, every plan and every best policy on the same unseen rng seeds."""
    arms: dict[str, dict[str, object]] = {name: {"controller": name} for name in CONTROLS}
    arms |= {name: {"controller": "periodic", "plan": plan} for name, plan in PLANS.items()}
    for rng_seed in RNG_SEEDS:
        if arm_of(rng_seed) in trainings:
            policy = folder(rng_seed) / "best"
            arms[f"policy, {arm_of(rng_seed)}"] = {"controller": "ppo", "checkpoint": policy}
    settings = {arm: {"task": TASK, **own} for arm, own in arms.items()}
    return run_cells(settings, UNSEEN, episodes=EPISODES_EACH)


def table(results: dict[str, list[Cell]]) -> str:
    """Test scores with paired leads, bare and after rent; ± is the 95 % interval over rng seeds."""
    lines = [
        "| controller | test score | above random | above heuristic | parameters"
        " | after rent | after rent, above heuristic |",
        "|---|---|---|---|---|---|---|",
    ]
    bare = means_by_rng_seed(results, lambda cell: cell.test_score)
    paid = means_by_rng_seed(results, lambda cell: cell.after_rent(RENT))

    def lead(scores: dict[str, list[float]], arm: str, control: str) -> str:
        return "" if arm == control else str(paired_difference(scores[arm], scores[control]))

    for arm, cells in results.items():
        columns = (
            arm,
            str(estimate(bare[arm])),
            lead(bare, arm, "random"),
            lead(bare, arm, "heuristic"),
            f"{sum(cell.params for cell in cells) / len(cells):,.0f}",
            str(estimate(paid[arm])),
            lead(paid, arm, "heuristic"),
        )
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def courses(trainings: Trainings) -> str:
    """What the trainings looked like."""
    lines = [
        "| training | CPU minutes | best iteration | explained variance, last 5 iterations"
        " | least blueprint entropy before the last fifth | least tempo entropy before the last fifth |",
        "|---|---|---|---|---|---|",
    ]
    lines += [f"| {arm} | {' | '.join(_course(training))} |" for arm, training in trainings.items()]
    return "\n".join(lines) + "\n"


def _course(training: dict[str, Any]) -> list[str]:
    iterations = training["iterations"]
    evaluated = [row for row in iterations if row["evaluation_return"] is not None]
    best = max(evaluated, key=lambda row: row["evaluation_return"])
    explained = [row["explained_variance"] for row in iterations[-5:]]
    before_last_fifth = iterations[: len(iterations) * 4 // 5]

    def least(head: str) -> str:
        found = [row["head_entropy"][HEAD_NAMES.index(head)] for row in before_last_fifth]
        return f"{min(value for value in found if value is not None):.2f}"

    return [
        f"{training['cpu_minutes']:.0f}",
        str(best["iteration"]),
        f"{sum(explained) / len(explained):.2f}",
        least("blueprint"),
        least("tempo"),
    ]


def main() -> None:
    kept = HERE / "trainings.json"
    trainings: Trainings = json.loads(kept.read_text()) if kept.exists() else {}
    if sys.argv[1:] != ["judge"]:
        train_all(trainings, kept)
    results = judge(trainings)
    cells = [cell.as_dict() for cells in results.values() for cell in cells]
    (HERE / "results.json").write_text(json.dumps(cells) + "\n")
    (HERE / "table.md").write_text(table(results))
    first = {arm: [cell for cell in cells if cell.episode == 0] for arm, cells in results.items()}
    (HERE / "first-episodes.md").write_text(table(first))
    (HERE / "courses.md").write_text(courses(trainings))
    (HERE / "curves.svg").write_text(draw_curves(trainings, results))
    print(table(results), courses(trainings), sep="\n")


if __name__ == "__main__":
    main()
