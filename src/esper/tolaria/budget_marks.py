"""Results of one run at several shares of its compute budget (marks).

With a decay schedule a run has no usable result before its end. Therefore the run is copied at 0.8 of the
compute of every mark. The copy of the run plants no more seeds, decays its learning rate, commits and is
tested at the mark; the run itself continues unchanged. The compute of a copy is not charged to the run: a
result at mark m costs m.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from esper.kasmina.schedules import DECAY_SHARE
from esper.leyline import CANONICAL_ACTION, Controller, EpochFacts, EsperError
from esper.tolaria.env import MorphEnv
from esper.tolaria.episode_report import EpisodeReport
from esper.tolaria.tasks.spec import TaskSpec

MARKS: Final = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)


class Branch(NamedTuple):
    """Copy of a run that ended at a mark, with its report."""

    mark: float
    env: MorphEnv
    report: EpisodeReport


def branches(
    task: TaskSpec,
    controller: Controller | None,
    *,
    rng_seed: int,
    marks: tuple[float, ...] = MARKS,
    prepare: Callable[[MorphEnv], object] = lambda env: None,
) -> Iterator[Branch]:
    """Run one episode and yield a finished copy of the run at every mark.

    If too many rollbacks end the episode, the last good network is the result at later marks.

    Args:
        task: Task with a budget and a ``wsd`` schedule.
        controller: Chooses the actions; None always waits.
        rng_seed: Root seed of the episode.
        marks: Shares of the budget.
        prepare: Called with the environment before its first step.
    """
    steps = branching_steps(task, marks)
    env = MorphEnv(task, rng_seed=rng_seed)
    facts = EpochFacts.stack([env.reset()])
    prepare(env)
    if controller is not None:
        controller.reset(0)
    for step, mark in steps.items():
        while env.epoch < step and not env.ended:
            waiting = np.array([CANONICAL_ACTION])
            actions = waiting if controller is None else controller.decide(facts, env.table).actions
            facts = EpochFacts.stack([env.step(actions[0])])
        is_end = env.ended and mark == max(marks)
        yield Branch(mark, env, env.finish()) if is_end else _finish(env, mark, rng_seed)


def branching_steps(task: TaskSpec, marks: Sequence[float]) -> dict[int, float]:
    """Return the marks by the step at which the run is copied; no copy is needed if 1.0 is the only mark.

    Raises:
        EsperError: The schedule is not ``wsd``, or 0.8 of a mark is not a whole step.
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


def _finish(run: MorphEnv, mark: float, rng_seed: int) -> Branch:
    """Copy ``run`` and continue the copy to ``mark`` without growth."""
    branch = MorphEnv(run.task.until(mark), rng_seed=rng_seed)
    branch.reset()
    branch.load_state(run.state())
    return Branch(mark, branch, branch.run_out())
