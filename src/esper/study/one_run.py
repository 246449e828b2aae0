"""One run of a study: a network trained with the whole compute budget, with losses and score at every mark
(share of the budget).
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from esper.kasmina.compute import ComputeLedger
from esper.leyline import Controller, DivergedError, EsperError
from esper.run.factories import one_thread
from esper.study.study_config import StudyConfig, controller_of, space_of
from esper.tamiyo.policy.checkpoint import load_policy
from esper.tamiyo.policy.controller import PolicyController
from esper.tamiyo.schedule import Schedule, parse_plan
from esper.tolaria.budget_marks import Branch, branches
from esper.tolaria.env import MorphEnv
from esper.tolaria.episode import plant_fossils, run_episode, seeds_of
from esper.tolaria.tasks import TaskSpec
from esper.tolaria.vector import SerialVector

TOLERANCE = 0.01
"""Largest allowed relative difference between the compute that a run spent and its share of the budget; a
difference of one minibatch is always allowed.
"""


class StudyRun(msgspec.Struct, frozen=True):
    """Identity of a run within a study: task, text of the arm, factors on the learning rate, and rng seed.

    The field ``what`` is the text of an arm, such as ``static:3``, or ``whole:PLAN`` for a network that has
    all seeds of the plan from the start.
    """

    task: str
    what: str
    factors: tuple[float, ...]
    """Factor that multiplies the learning rate of the task, as a tuple."""
    rng_seed: int


class MarkResult(msgspec.Struct, frozen=True):
    """Losses, score and size of the network of a run if the compute budget had ended at a mark (share of the
    budget).
    """

    mark: float
    val_loss: float
    test_loss: float
    test_score: float
    params: int
    seeds: str
    """Fossilized seeds of the network, as the text of a plan, such as ``mlp/linear_add@r0c0:0``."""
    flops: dict[str, int]
    due: int
    """FLOPs that a run may spend up to the mark: its share of the budget."""
    minibatch: int
    """FLOPs of the last training minibatch before the mark."""
    cut_short: bool
    seconds: float | None = None
    """CPU seconds of the run up to the mark; None if they were not measured."""

    @property
    def charged(self) -> int:
        return msgspec.convert(self.flops, ComputeLedger).charged


class RunResult(msgspec.Struct, frozen=True):
    """Finished run of a study; ``answers`` has one result per mark of the budget, and is None if the host
    diverged.
    """

    run: StudyRun
    answers: list[MarkResult] | None


def do_run(config: StudyConfig, run: StudyRun) -> RunResult:
    """Execute a run of a study and check the compute that it spent up to each mark of the budget.

    Raises:
        EsperError: A run spent more or less compute up to a mark of the budget than the mark allows.
    """
    task = config.task(run.task)
    with one_thread():
        try:
            answers = list(_answers(task, run, config))
        except DivergedError:
            return RunResult(run, None)
    for answer in answers:
        check_spent(run, answer)
    return RunResult(run, answers)


def check_spent(run: StudyRun, answer: MarkResult) -> None:
    """Raise an error if a run spent more or less compute up to a mark of the budget than the mark allows;
    runs ended early by rollbacks are exempt.
    """
    most = max(TOLERANCE * answer.due, answer.minibatch)
    if not answer.cut_short and abs(answer.charged - answer.due) > most:
        raise EsperError(
            f"'{run.what}' on {run.task} with rng seed {run.rng_seed} spent {answer.charged:,} FLOP where"
            f" every arm spends {answer.due:,}; its numbers cannot be compared: leave the arm out, or give a"
            " larger budget"
        )


def _answers(task: TaskSpec, run: StudyRun, config: StudyConfig) -> Iterable[MarkResult]:
    kind, _, argument = run.what.partition(":")
    episode = partial(branches, rng_seed=run.rng_seed, marks=config.marks)
    task = _with_rate(task, *run.factors)
    if kind == "static":
        found = episode(task.with_trunk(int(argument)), None)
    elif kind == "whole":
        found = episode(task, None, prepare=partial(_plant, argument))
    elif kind == "shuffled":
        found = episode(task, _shuffled(task, Path(argument), run.rng_seed, config.evaluation))
    else:
        found = episode(task, controller_of(run.what, space_of(task, run.rng_seed), run.rng_seed))
    return map(_answer, found)


def _plant(seeds: str, env: MorphEnv) -> None:
    """Plant all seeds of a plan as fossils before the first minibatch."""
    plan = parse_plan(seeds, env.action_space)
    assert isinstance(plan, Schedule)
    plant_fossils(env, [(entry.slot, entry.seed.blueprint, entry.seed.style) for entry in plan.entries])


def _answer(branch: Branch) -> MarkResult:
    mark, env, report, seconds = branch
    if not math.isfinite(report.test_loss):
        raise DivergedError(f"the test loss is {report.test_loss}")
    return MarkResult(
        mark=mark,
        val_loss=report.val_loss,
        test_loss=report.test_loss,
        test_score=report.test_score,
        params=report.params,
        seeds=seeds_of(env),
        flops=report.flops,
        due=env.host.budget or 0,
        minibatch=env.host.minibatch_flops,
        cut_short=report.cut_short,
        seconds=seconds,
    )


def _shuffled(task: TaskSpec, folder: Path, rng_seed: int, rng_seeds: range) -> Controller:
    """Return a control for a policy: a controller with the same policy that reads the observations of an
    episode with another rng seed.
    """
    other = rng_seed + 1 if rng_seed + 1 in rng_seeds else rng_seeds[0]
    if other == rng_seed:
        other += 1
    policy = load_policy(folder)
    vector = SerialVector(task, rng_seed=other)
    vector.reset(0)
    controller = PolicyController(vector.action_space, 1, policy)
    run_episode(vector, controller)
    return PolicyController(space_of(task, rng_seed), 1, policy, shown=controller.observations)


def _with_rate(task: TaskSpec, factor: float) -> TaskSpec:
    rates = tuple(factor * rate for rate in task.instances.learning_rates)
    return replace(task, instances=replace(task.instances, learning_rates=rates))
