"""``PolicyController`` takes the argmax actions of its policy."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from esper.leyline import SlotTable
from esper.leyline.factored_actions import IntArray
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic, Hidden, PolicyDecision
from esper.tamiyo.policy.action_masks import ActionMasks, compute_batch_masks
from esper.tamiyo.policy.controller import PolicyController
from esper.tamiyo.policy.features import batch_obs_to_features
from esper.tamiyo.tracker import SignalTracker
from tests.leyline.building import assert_legal, facts_of, random_table, space_of
from tests.tamiyo.policy.small_policies import policy_of
from tests.tolaria.building import bits

ENVS, STEPS, SLOTS = 3, 6, 4
SPACE = space_of(SLOTS, auto_forward=False)


@pytest.fixture
def policy() -> FactoredRecurrentActorCritic:
    """Return a small policy whose choices depend on its LSTM state."""
    policy = policy_of(SLOTS)
    with torch.no_grad():
        for parameter in policy.lstm.parameters():
            parameter.mul_(3.0)
    return policy


def tables(rng_seed: int = 0) -> list[SlotTable]:
    rng = np.random.default_rng(rng_seed)
    return [random_table(rng, ENVS, SLOTS) for _ in range(STEPS)]


def decided(controller: PolicyController, seen: list[SlotTable], first: int = 0) -> list[IntArray]:
    return [
        controller.decide(facts_of(step, loss=2.0 - 0.1 * step, num_envs=ENVS), table).actions
        for step, table in enumerate(seen, start=first)
    ]


def decided_by_hand(policy: FactoredRecurrentActorCritic, seen: list[SlotTable]) -> list[IntArray]:
    tracker, hidden = SignalTracker(ENVS), policy.get_initial_hidden(ENVS)
    chosen = []
    for step, table in enumerate(seen):
        signals = tracker.update(facts_of(step, loss=2.0 - 0.1 * step, num_envs=ENVS))
        features, blueprints = batch_obs_to_features(signals, table, SPACE.slot_config)
        with torch.no_grad():
            decision = policy.get_action(
                features, blueprints, hidden, compute_batch_masks(table, SPACE), deterministic=True
            )
        hidden = decision.hidden
        chosen.append(decision.actions.numpy())
    return chosen


def test_controller_actions_equal_argmax_actions_of_the_policy(policy: FactoredRecurrentActorCritic) -> None:
    for rng_seed in range(5):
        seen = tables(rng_seed)
        actions = decided(PolicyController(SPACE, ENVS, policy), seen)
        np.testing.assert_array_equal(actions, decided_by_hand(policy, seen))
        for action, table in zip(actions, seen, strict=True):
            assert_legal(action, table, SPACE)


def test_reset_of_a_policy_controller_clears_trends_and_lstm_state(
    policy: FactoredRecurrentActorCritic, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_action, shown = policy.get_action, []

    def watched(
        state: Tensor, blueprints: Tensor, hidden: Hidden, masks: ActionMasks, **how: Any
    ) -> PolicyDecision:
        shown.append(bits([state, blueprints, hidden]))
        return get_action(state, blueprints, hidden, masks, **how)

    monkeypatch.setattr(policy, "get_action", watched)
    controller = PolicyController(SPACE, ENVS, policy)
    # Starts at epoch 3, since trends restart at epoch 0 even without a reset.
    first = decided(controller, tables(), first=3)
    shown_first = shown.copy()
    for rng_seed in range(1, 4):
        decided(controller, tables(rng_seed))
        controller.reset(rng_seed)
        shown.clear()
        np.testing.assert_array_equal(decided(controller, tables(), first=3), first)
        assert shown == shown_first


def test_decide_changes_neither_policy_weights_nor_the_global_random_generator(
    policy: FactoredRecurrentActorCritic,
) -> None:
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    decided(PolicyController(SPACE, ENVS, policy), tables())
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    assert all(parameter.grad is None for parameter in policy.parameters())
