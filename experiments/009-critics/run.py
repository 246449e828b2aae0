"""V(s) or Q(s, op), heads that see the op or do not, siblings or none: how fast does each learn?

digits_impaired, the first 10 of the study's 25 iterations, so that entropy and all else is the study's,
with its three rng seeds. The curves of the study itself are read from experiments/005-policy/trainings.json.

Run with ``.venv/bin/python experiments/009-critics/run.py`` (about forty minutes on two cores). It rewrites
results.json and table.md beside this file.

The option of siblings is gone since; revision 221dcb4 has it and repeats this table.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from esper.teaching import teach

from esper.karn.run import read_rows
from esper.karn.statistics import estimate, paired_difference
from esper.leyline.rows import UpdateRow
from esper.run.run_config import training_config
from esper.simic.training.trainer import IterationSummary

HERE = Path(__file__).parent
STUDY = HERE.parent / "005-policy" / "trainings.json"
RNG_SEEDS = (0, 1, 2)
ITERATIONS = 10
DEFAULT = "the study: V(s), heads see the op, groups of 4 siblings"
VARIANTS: dict[str, dict[str, object]] = {
    "Q(s, op)": {"critic": "op_value"},
    "independent heads": {"conditioned": False},
    "no siblings": {"siblings": 1},
}
KEPT = ("mean_return", "explained_variance", "evaluation_return", "evaluation_score")

Course = list[dict[str, Any]]


class _EnoughError(Exception):
    """The last iteration that is wanted is done."""


def train(variant: str, rng_seed: int) -> Course:
    """The iterations of one training, in a process of its own."""
    config = training_config("study", {}, {**VARIANTS[variant], "rng_seed": rng_seed})

    def stop(summary: IterationSummary) -> None:
        if summary.iteration == ITERATIONS:
            raise _EnoughError

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with suppress(_EnoughError):
            teach(config, run, on_iteration=stop)
        return [{name: getattr(row, name) for name in KEPT} for row in read_rows(run, UpdateRow)]


def study_course(rng_seed: int) -> Course:
    iterations = json.loads(STUDY.read_text())[f"rng seed {rng_seed}"]["iterations"]
    return [{name: row[name] for name in KEPT} for row in iterations[:ITERATIONS]]


def table(courses: Mapping[str, Sequence[Course]]) -> str:
    """Means over the rng seeds; ± is the 95 % interval, which three rng seeds leave wide."""
    lines = [
        "| learner | evaluation score after 5 iterations | after 10 | return per episode, iterations 6-10"
        " | above the study's | explained variance, iterations 6-10 |",
        "|---|---|---|---|---|---|",
    ]
    earned = {
        variant: [fmean(row["mean_return"] for row in course[5:]) for course in found]
        for variant, found in courses.items()
    }
    for variant, found in courses.items():
        scores = [
            estimate([course[number - 1]["evaluation_score"] for course in found]) for number in (5, 10)
        ]
        lead = "" if variant == DEFAULT else _fine(paired_difference(earned[variant], earned[DEFAULT]))
        explained = fmean(row["explained_variance"] for course in found for row in course[5:])
        lines.append(
            f"| {variant} | {scores[0]} | {scores[1]} | {_fine(estimate(earned[variant]))} | {lead}"
            f" | {explained:.2f} |"
        )
    return "\n".join(lines) + "\n"


def _fine(value: Any) -> str:
    return f"{value.mean:.2f} ± {value.half_width:.2f}"


def main() -> None:
    courses = {DEFAULT: [study_course(rng_seed) for rng_seed in RNG_SEEDS]}
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {
            variant: [pool.submit(train, variant, rng_seed) for rng_seed in RNG_SEEDS] for variant in VARIANTS
        }
        for variant, found in jobs.items():
            courses[variant] = [job.result() for job in found]
    (HERE / "results.json").write_text(json.dumps(courses) + "\n")
    (HERE / "table.md").write_text(table(courses))
    print(table(courses))


if __name__ == "__main__":
    main()
