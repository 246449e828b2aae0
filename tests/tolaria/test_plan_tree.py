"""Plans that share their beginnings end bit for bit like plans that run alone."""

from dataclasses import asdict
from typing import Any

import pytest

from esper.leyline import BlueprintAction, EnvFacts, EsperError
from esper.leyline.slot_table import IntArray
from esper.tolaria.env import MorphEnv
from esper.tolaria.plan_tree import Plan, run_plans
from tests.tolaria.building import bits, noisy_task, plant

PLANS: list[Plan[str]] = [
    (),
    ((1, "light"),),
    ((1, "heavy"),),
    ((1, "light"), (3, "heavy")),
    ((1, "light"), (4, "light")),
    ((4, "light"),),
]
BLUEPRINTS = {"light": BlueprintAction.CONV_LIGHT, "heavy": BlueprintAction.CONV_HEAVY}


def started() -> MorphEnv:
    env = MorphEnv(noisy_task(horizon=6, batches_per_epoch=2), rng_seed=3)
    env.reset()
    return env


def grow(env: MorphEnv, name: str) -> IntArray:
    free = [slot for slot in range(env.table.num_slots) if not env.table.occupied[0, slot]]
    return plant(free[0], BLUEPRINTS[name])


def results(plans: list[Plan[str]]) -> tuple[dict[Any, Any], int]:
    """Return the report and the last facts of every plan bit for bit, and the number of training steps."""
    steps = list[tuple[Plan[str], EnvFacts]]()
    reports = {
        plan: bits(asdict(report))
        for plan, report in run_plans(started(), plans, grow, lambda done, facts: steps.append((done, facts)))
    }
    last = {done: bits(asdict(facts)) for done, facts in steps}
    return {plan: (reports[plan], last[plan]) for plan in reports}, len(steps)


def test_every_plan_of_a_tree_ends_bit_for_bit_as_it_does_alone() -> None:
    together, steps = results(PLANS)
    assert set(together) == set(PLANS)
    alone = [results([plan]) for plan in PLANS]
    assert steps < sum(count for _, count in alone) == 6 * len(PLANS)
    for plan, (single, _) in zip(PLANS, alone, strict=True):
        assert together[plan] == single[plan]
    assert len({repr(result) for result in together.values()}) == len(PLANS), (
        "different plans end differently"
    )


@pytest.mark.parametrize("steps", [(3, 1), (2, 2), (6,), (-1,)])
def test_steps_that_do_not_ascend_within_the_episode_are_refused(steps: tuple[int, ...]) -> None:
    with pytest.raises(EsperError, match="must ascend, from 0 to 5"):
        next(run_plans(started(), [tuple((step, "light") for step in steps)], grow))


def test_equal_plans_are_refused() -> None:
    with pytest.raises(EsperError, match="equal"):
        next(run_plans(started(), [((1, "light"),), ((1, "light"),)], grow))
