"""``PolicyController`` whose policy receives recorded observations of another episode."""

import numpy as np
import pytest

from esper.leyline import SlotTable
from esper.leyline.signals import Controller, Decisions
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic
from esper.tamiyo.policy.controller import PolicyController
from tests.leyline.building import assert_legal, facts_of, random_table, space_of
from tests.tamiyo.policy.small_policies import policy_of

STEPS, SLOTS = 12, 4
SPACE = space_of(SLOTS, auto_forward=False)


@pytest.fixture(scope="module")
def policy() -> FactoredRecurrentActorCritic:
    return policy_of(SLOTS)


def tables(rng_seed: int) -> list[SlotTable]:
    rng = np.random.default_rng(rng_seed)
    return [random_table(rng, 1, SLOTS) for _ in range(STEPS)]


def decided(controller: Controller, seen: list[SlotTable], fall: float) -> list[Decisions]:
    """Return the policy's decisions in an episode whose loss falls by ``fall`` per step."""
    controller.reset(0)
    return [
        controller.decide(facts_of(step, loss=5.0 - fall * step), table) for step, table in enumerate(seen)
    ]


def test_policy_that_is_shown_observations_of_another_episode_repeats_the_decisions_of_that_episode(policy):
    other = PolicyController(SPACE, 1, policy)
    there = decided(other, tables(0), fall=0.3)
    shuffled = PolicyController(SPACE, 1, policy, shown=list(other.observations))
    for controller, fall in (
        (PolicyController(SPACE, 1, policy), 0.3),
        (shuffled, -0.2),  # The observations of the present episode are not shown to the policy.
        (shuffled, 0.1),
    ):
        found = decided(controller, tables(0), fall)
        assert [one.outputs for one in found] == [one.outputs for one in there]
        assert np.array_equal([one.actions for one in found], [one.actions for one in there])
    reacting = decided(PolicyController(SPACE, 1, policy), tables(0), fall=-0.2)
    assert [one.outputs for one in reacting] != [one.outputs for one in there]


def test_policy_that_is_shown_a_shorter_episode_takes_legal_actions_in_the_present_episode(policy):
    other = PolicyController(SPACE, 1, policy)
    decided(other, tables(0)[:5], fall=0.3)
    assert len(other.observations) == 5
    here = tables(1)
    found = decided(PolicyController(SPACE, 1, policy, shown=other.observations), here, fall=0.1)
    for decisions, table in zip(found, here, strict=True):
        assert_legal(decisions.actions, table, SPACE)
