"""Trainings that share their beginnings: plans of growth as one tree.

A plan states the steps of an episode at which something is decided, and what. Episodes of one instance with
equal random streams are equal until the first decision in which their plans differ. So the episode is trained
once up to there and copied, and a tree of plans costs far less than all its episodes.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from esper.leyline import CANONICAL_ACTION, EnvFacts, EsperError
from esper.leyline.factored_actions import IntArray
from esper.tolaria.env import EpisodeReport, MorphEnv

D = TypeVar("D", bound=Hashable)
Plan = tuple[tuple[int, D], ...]
"""Steps of an episode, ascending, each with the decision that is carried out at its beginning."""


class FinishedPlan(NamedTuple):
    """Report of the episode of a plan; the environment holds the committed network until the next plan."""

    plan: Plan[Hashable]
    report: EpisodeReport


def run_plans(
    env: MorphEnv,
    plans: Sequence[Plan[D]],
    decide: Callable[[MorphEnv, D], IntArray],
    after_step: Callable[[Plan[D], EnvFacts], object] = lambda plan, facts: None,
) -> Iterator[FinishedPlan]:
    """Run the episode of every plan once and yield its report; common beginnings of plans are trained once.

    Args:
        env: Environment after ``reset``.
        plans: Different plans.
        decide: Function that carries out a decision on the environment and returns the action of the step.
        after_step: Function that is called after every training step, with the decisions so far.

    Raises:
        EsperError: Two plans are equal, or a plan has steps that are not ascending or not in the episode.
    """
    for plan in plans:
        steps = [step for step, _ in plan]
        if steps != sorted(set(steps)) or not all(env.epoch <= step < env.task.horizon for step in steps):
            raise EsperError(
                f"the steps of a plan are {steps}; they must ascend, from {env.epoch} to"
                f" {env.task.horizon - 1}"
            )
    if len(set(plans)) < len(plans):
        raise EsperError("two of the plans are equal; name each plan once")
    yield from _below((), env, plans, decide, after_step)


def _below(
    done: Plan[D],
    env: MorphEnv,
    plans: Sequence[Plan[D]],
    decide: Callable[[MorphEnv, D], IntArray],
    after_step: Callable[[Plan[D], EnvFacts], object],
) -> Iterator[FinishedPlan]:
    """Run the plans that begin with the decisions ``done``, which have been carried out."""
    ahead = [plan[len(done)][0] for plan in plans if len(plan) > len(done)]
    until = min(ahead, default=env.task.horizon)
    while env.epoch < until and not env.ended:
        after_step(done, env.step(np.array(CANONICAL_ACTION)))
    if env.ended:  # Too many rollbacks end an episode early; the decisions left have nothing to act on.
        yield from _ended(env, plans)
        return
    now = [plan[len(done)] for plan in plans if len(plan) > len(done)]
    branches = list(dict.fromkeys(decision for decision in now if decision[0] == until))
    later = [plan for plan in plans if plan[len(done) : len(done) + 1] not in [(b,) for b in branches]]
    start = env.state()
    for branch in branches:
        action = decide(env, branch[1])
        after_step((*done, branch), env.step(action))
        same = [plan for plan in plans if plan[: len(done) + 1] == (*done, branch)]
        yield from _below((*done, branch), env, same, decide, after_step)
        env.load_state(start)
    if later:
        yield from _below(done, env, later, decide, after_step)


def _ended(env: MorphEnv, plans: Sequence[Plan[D]]) -> Iterator[FinishedPlan]:
    report = env.finish()
    for plan in plans:
        yield FinishedPlan(plan, report)
