"""Largest regret of clocks, `counting`, halving and extrapolation on every scaling task.

The reference is the best of 1 to 3 blocks with three learning rates, at each of ten marks in hindsight. Rates
are selected on one rng seed, results are of three others. The unit of a claim is the task: each is a row.

    .venv/bin/python experiments/028-tasks/run.py study python      # about 6 CPU-hours
    .venv/bin/python experiments/028-tasks/run.py held_out          # about 1.5 CPU-hours; once, at the end

A task has 66 runs: 24 with the selection rng seed, 42 with the others; a run takes about 40 CPU-seconds.

Each name is a study file in this folder; its results go to runs/028-NAME, and runs that are there are not
repeated. table.md is written from all of these studies that are complete.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from esper.karn import resampling
from esper.karn.study_page import StudyNumbers
from esper.run.run_config import checked, read_settings
from esper.study.one_run import RunResult, StudyRun
from esper.study.phases import StudyPhases
from esper.study.study import run_study
from esper.study.study_config import StudyConfig
from esper.study.study_journal import open_journal
from esper.study.study_results import numbers_of

HERE = Path(__file__).parent
NAMES = ("study", "python", "held_out")
PROCESSES = 2


def studied(name: str) -> Iterator[StudyNumbers]:
    """Yield the results of every task of a finished study, without a new run."""
    file, out = HERE / f"{name}.toml", Path("runs") / f"028-{name}"
    config = checked(StudyConfig, read_settings(file))
    with open_journal(out, file, config) as journal:

        def recorded(runs: Sequence[StudyRun]) -> Mapping[StudyRun, RunResult]:
            return journal.lines

        for task in config.tasks:
            yield numbers_of(config, task, StudyPhases(config, task, recorded).run())


def row(found: StudyNumbers) -> dict[str, str]:
    """Return the largest regret of every arm in per cent; of the static sizes, that of the best."""
    always = np.ones(len(found.marks), dtype=bool)
    worst = {name: resampling.largest(above, always) for name, above in found.regrets().items()}
    static = min((arm.name for arm in found.arms if arm.is_static), key=lambda name: worst[name][0])
    kept = {arm.name: worst[arm.name] for arm in found.arms if not arm.is_static}
    texts = {
        name: "{:.1f} ({:.1f} to {:.1f})".format(*(100 * value for value in resampling.interval(drawn)))
        for name, drawn in {"best fixed size": worst[static], **kept}.items()
    }
    return {"task": found.task, **texts}


def main(*names: str) -> None:
    for name in names:
        file = HERE / f"{name}.toml"
        run_study(file, Path("runs") / f"028-{name}", PROCESSES, print, lambda text: None)
    complete = [name for name in NAMES if (Path("runs") / f"028-{name}" / "table.md").exists()]
    rows = [row(found) for name in complete for found in studied(name)]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(own.values()) for own in rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    (HERE / "table.md").write_text(f"Largest regret in per cent, with 95 % intervals.\n\n{table}\n")
    print(table)


if __name__ == "__main__":
    main(*sys.argv[1:])
