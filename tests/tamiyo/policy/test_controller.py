"""``PolicyController`` takes the argmax actions of its policy."""

from operator import itemgetter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from esper.leyline import NUM_HEADS, SlotTable
from esper.leyline.factored_actions import IntArray
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic, Hidden, PolicyDecision
from esper.tamiyo.policy.action_masks import ActionMasks, compute_batch_masks
from esper.tamiyo.policy.controller import PolicyController, decide
from esper.tamiyo.policy.distributions import EmptyMaskError
from esper.tamiyo.policy.features import Observation, batch_obs_to_features, get_feature_size
from esper.tamiyo.tracker import SignalTracker
from tests.leyline.building import assert_legal, facts_of, random_table, space_of
from tests.tamiyo.policy.small_policies import policy_of
from tests.tolaria.building import bits
from tests.tolaria.reads import counted_reads

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
    # The test starts at epoch 3, because at epoch 0 trends restart even without a reset.
    first = decided(controller, tables(), first=3)
    shown_first = shown.copy()
    for rng_seed in range(1, 4):
        decided(controller, tables(rng_seed))
        controller.reset(rng_seed)
        shown.clear()
        np.testing.assert_array_equal(decided(controller, tables(), first=3), first)
        assert shown == shown_first


def test_decision_of_a_policy_controller_changes_neither_weights_nor_the_global_random_generator(
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


# --- one copy from the policy's device ------------------------------------------------------------------


def observed(envs: int) -> Observation:
    """Return random observations of environments with random slot tables."""
    table, torch_stream = random_table(np.random.default_rng(0), envs, SLOTS), torch.Generator()
    features = torch.randn(envs, get_feature_size(SPACE.slot_config), generator=torch_stream)
    return Observation(features, torch.from_numpy(table.blueprint), compute_batch_masks(table, SPACE))


@pytest.mark.parametrize("sampled", [True, False])
def test_decisions_of_any_number_of_environments_are_read_from_the_device_once(
    sampled: bool, policy: FactoredRecurrentActorCritic, monkeypatch: pytest.MonkeyPatch
) -> None:
    uniforms = torch.rand(7, NUM_HEADS) if sampled else None
    seen, hidden = observed(7), policy.get_initial_hidden(7)
    for at_once in (None, 2):
        with counted_reads(monkeypatch) as reads:
            decide(policy, seen, hidden, uniforms, at_once=at_once)
        assert reads.calls == ["cpu"]


def test_decisions_of_two_environments_at_once_are_bit_equal_to_those_of_pairs_alone(
    policy: FactoredRecurrentActorCritic,
) -> None:
    seen, uniforms = observed(7), torch.rand(7, NUM_HEADS)
    h, c = (torch.randn(state.shape) for state in policy.get_initial_hidden(7))
    together = decide(policy, seen, (h, c), uniforms, at_once=2)
    for first in (0, 2, 4, 6):
        pair = slice(first, first + 2)
        alone = decide(policy, seen.each(itemgetter(pair)), (h[:, pair], c[:, pair]), uniforms[pair])
        assert bits(list(alone[:5])) == bits([column[pair] for column in together[:5]])
        assert bits(list(alone.hidden)) == bits([state[:, pair] for state in together.hidden])


def test_decide_raises_with_head_and_environment_if_a_head_has_no_legal_value(
    policy: FactoredRecurrentActorCritic,
) -> None:
    seen = observed(1)
    masks = compute_batch_masks(SlotTable.empty(1, SLOTS), space_of(SLOTS, blueprints=()))
    with pytest.raises(EmptyMaskError, match="head blueprint of environment 0"):
        decide(
            policy,
            seen._replace(masks=masks),
            policy.get_initial_hidden(1),
            torch.full((1, NUM_HEADS), 0.999),
        )
