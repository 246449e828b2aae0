"""Does the governor notice what it should, and nothing else?

Per task 20 healthy episodes under the heuristic, in which it must not intervene; and episodes that go wrong
after their sixth epoch: the learning rate times 30, or the last layer set to zero and kept there. An alarm
is in time within three epochs.

Run with ``.venv/bin/python experiments/011-governor/run.py`` (about ten minutes on two cores); it rewrites
table.md beside this file. Tasks may be named, to run only those.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from esper.leyline.rows import AlertRow, Row
from esper.tamiyo import HeuristicController
from esper.tolaria.env import MorphEnv
from esper.tolaria.seeding import TEST_SEEDS
from esper.tolaria.tasks import task_named
from esper.tolaria.vector import SerialVector

HERE = Path(__file__).parent
TASKS = ("digits", "digits_impaired", "fashion14", "pycode")
HEALTHY, BROKEN = 20, 5
WRONG_AFTER, IN_TIME = 6, 3


class Alerts:
    """A sink that keeps alerts only."""

    def __init__(self) -> None:
        self.rows: list[AlertRow] = []

    def emit(self, row: Row) -> None:
        if isinstance(row, AlertRow):
            self.rows.append(row)


def fast(env: MorphEnv) -> None:
    """The learning rate, of the host and of seeds to come, times 30."""
    recipe = env.model.recipe
    settings = {**recipe.settings, "lr": 30 * recipe.learning_rate}
    env.model._recipe = replace(recipe, settings=settings)


def forgetful(env: MorphEnv) -> None:
    """The layer before the answer, at zero for good."""
    last = [module for module in env.model.host.modules() if isinstance(module, nn.Linear | nn.LayerNorm)][-1]
    for parameter in last.parameters():
        nn.init.zeros_(parameter)
        parameter.requires_grad_(requires_grad=False)


MISHAPS: dict[str, Callable[[MorphEnv], None] | None] = {
    "healthy": None,
    "learning rate × 30": fast,
    "last layer forgotten": forgetful,
}


def live(task: str, rng_seed: int, mishap: str) -> list[AlertRow]:
    """The alerts of one episode; one that goes wrong is watched for as long as an alarm is in time."""
    torch.set_num_threads(1)
    sink = Alerts()
    vector = SerialVector(task_named(task), rng_seed=rng_seed, sink=sink)
    facts = vector.reset()
    controller = HeuristicController(vector.action_space, num_envs=1)
    happens = MISHAPS[mishap]
    while not facts.ended.all():
        epoch = int(facts.epoch[0])
        if happens is not None and epoch == WRONG_AFTER:
            happens(vector.envs[0])
        if happens is not None and epoch == WRONG_AFTER + IN_TIME:
            break
        facts = vector.step(controller.decide(facts, vector.table))
    return sink.rows


def summary(task: str, mishap: str, episodes: list[list[AlertRow]]) -> str:
    raised = [rows for rows in episodes if rows]
    first = [rows[0].epoch - WRONG_AFTER for rows in raised] if mishap != "healthy" else []
    kinds = sorted({row.rule for rows in raised for row in rows})
    answers = sorted({row.hint.removeprefix("the governor ").split()[0] for rows in raised for row in rows})
    delay = f"{max(first)}" if first else ""
    columns = (
        task,
        mishap,
        str(len(episodes)),
        str(len(raised)),
        delay,
        ", ".join(kinds),
        ", ".join(answers),
    )
    return f"| {' | '.join(columns)} |"


def main() -> None:
    lines = [
        "| task | episode | episodes | with an alarm | epochs until the alarm, at most | what it said"
        " | what was done |",
        "|---|---|---|---|---|---|---|",
    ]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        for task in sys.argv[1:] or TASKS:
            for mishap in MISHAPS:
                seeds = TEST_SEEDS[: HEALTHY if mishap == "healthy" else BROKEN]
                jobs = [pool.submit(live, task, rng_seed, mishap) for rng_seed in seeds]
                lines.append(summary(task, mishap, [job.result() for job in jobs]))
                print(lines[-1], flush=True)
    (HERE / "table.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
