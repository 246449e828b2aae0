"""Tests of one run at several marks, which are shares of its compute budget.

A run whose learning rate decays at the end has no usable network before its end. To test the run at a mark
before its end, the run is copied when it has spent 0.8 of the compute of that mark. The copy of the run
plants no more seeds, decays its learning rate, commits and is tested at the mark; the run itself continues
unchanged. The compute of the copies is not charged to the run: a network that is tested at a mark has cost
the compute of that mark.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from esper.kasmina.optimizer_groups import DECAY_SHARE
from esper.leyline import CANONICAL_ACTION, Controller, EpochFacts, EsperError
from esper.tolaria.env import EpisodeReport, MorphEnv
from esper.tolaria.tasks.spec import TaskSpec

MARKS: Final = tuple(steps / 32 for steps in (1, 2, 3, 4, 6, 8, 11, 16, 23, 32))
"""Marks from 1/32 to 1 that differ by factors of the square root of two from 3/32 on, as near as whole steps
allow.
"""


class Branch(NamedTuple):
    """Copy of a run that ended at a compute mark of the budget, with the report of its episode."""

    mark: float
    env: MorphEnv
    report: EpisodeReport
    seconds: float
    """CPU seconds of this process for the steps of the run up to the mark, with their validations."""


def branches(
    task: TaskSpec,
    controller: Controller | None,
    *,
    rng_seed: int,
    marks: tuple[float, ...] = MARKS,
    prepare: Callable[[MorphEnv], object] = lambda env: None,
) -> Iterator[Branch]:
    """Run one episode and yield a finished copy of it at every compute mark of the budget.

    If too many rollbacks end the episode, its last good network is tested at all later marks.

    Args:
        task: Task with a budget and a ``wsd`` (warmup-stable-decay) schedule.
        controller: Controller that chooses the actions; None waits at every step.
        rng_seed: Root of the random streams of the episode.
        marks: Shares of the budget at which a copy of the run is tested.
        prepare: Function that is called with the environment before its first step.
    """
    steps = branching_steps(task, marks)
    env = MorphEnv(task, rng_seed=rng_seed)
    facts = EpochFacts.stack([env.reset()])
    prepare(env)
    if controller is not None:
        controller.reset(0)
    spent = 0.0
    for step, mark in steps.items():
        began = time.process_time()
        while env.epoch < step and not env.ended:
            waiting = np.array([CANONICAL_ACTION])
            actions = waiting if controller is None else controller.decide(facts, env.table).actions
            facts = EpochFacts.stack([env.step(actions[0])])
        spent += time.process_time() - began
        is_end = env.ended and mark == max(marks)
        yield Branch(mark, env, env.finish(), spent) if is_end else _finish(env, mark, rng_seed, spent)


def branching_steps(task: TaskSpec, marks: Sequence[float]) -> dict[int, float]:
    """Return the budget marks as a dict whose keys are the steps at which the run is copied.

    If 1.0 is the only mark, the run is not copied but tested at its last step.

    Raises:
        EsperError: The learning-rate schedule is not ``wsd`` (warmup-stable-decay), or 0.8 of a mark is not a
            whole number of steps.
    """
    if tuple(marks) == (1.0,):
        return {task.horizon: 1.0}
    return {_branching_step(task, mark): mark for mark in sorted(marks)}


def _branching_step(task: TaskSpec, mark: float) -> int:
    step = (1.0 - DECAY_SHARE) * task.until(mark).horizon
    if task.schedule != "wsd" or abs(step - round(step)) > 1e-9:
        raise EsperError(
            f"an answer at {mark:g} of the budget needs a wsd schedule and a whole step at 0.8 of the mark;"
            f" '{task.name}' has {task.horizon} steps and the schedule {task.schedule}: choose other marks"
        )
    return round(step)


def _finish(run: MorphEnv, mark: float, rng_seed: int, spent: float) -> Branch:
    """Copy ``run`` and continue the copy without growth to the compute mark ``mark``."""
    branch = MorphEnv(run.task.until(mark), rng_seed=rng_seed)
    branch.reset()
    branch.load_state(run.state())
    began = time.process_time()
    return Branch(mark, branch, branch.run_out(), spent + time.process_time() - began)
