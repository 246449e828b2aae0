"""The policy network has the shapes, arguments and errors of the specification for any number of slots."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from esper.leyline import (
    BLUEPRINT_IDS,
    HEAD_NAMES,
    NUM_OPS,
    BlueprintAction,
    Head,
    SlotConfig,
    SlotTable,
    head_sizes,
)
from esper.leyline.factored_actions import CANONICAL_ACTION, FactoredAction
from esper.simic.agent.ppo import PPOAgent
from esper.simic.config import TrainingConfig
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic, FactoredRecurrentActorCriticV2
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.policy.features import get_feature_size
from tests.leyline.building import space_of

STATE = 20
SLOTS = pytest.mark.parametrize("slots", [1, 2, 5, 8])


@pytest.fixture(autouse=True)
def _rng_seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def network(slots: int, **shape: object) -> FactoredRecurrentActorCritic:
    """Return a small policy network for ``slots`` slots."""
    return FactoredRecurrentActorCritic(STATE, slots, feature_dim=16, hidden_dim=16, **shape)


def inputs(slots: int, *batch: int) -> tuple[Tensor, Tensor]:
    """Return random observations and blueprint indices, some of them -1 for an empty slot."""
    return torch.randn(*batch, STATE), torch.randint(-1, 13, (*batch, slots))


def count(policy: FactoredRecurrentActorCritic) -> int:
    return sum(parameter.numel() for parameter in policy.parameters())


@SLOTS
def test_forward_returns_logits_of_all_heads_and_a_gradient_for_every_weight(slots: int) -> None:
    policy = network(slots)
    state, blueprints = inputs(slots, 2, 3)
    found = policy(state.requires_grad_(), blueprints)
    logits = [found[f"{name}_logits"] for name in HEAD_NAMES]
    assert [tuple(one.shape) for one in logits] == [(2, 3, size) for size in head_sizes(slots)]
    assert found["value"].shape == (2, 3)
    (found["value"].sum() + sum(one.sum() for one in logits)).backward()
    assert state.grad is not None
    assert [name for name, weight in policy.named_parameters() if weight.grad is None] == []


def test_forward_gives_a_masked_slot_a_probability_of_zero() -> None:
    mask = torch.ones(4, 1, 5, dtype=torch.bool)
    mask[..., 2] = False
    found = network(5)(*inputs(5, 4, 1), slot_mask=mask)
    assert (found["slot_logits"].softmax(dim=-1)[..., 2] == 0.0).all()


def test_forward_takes_a_mask_for_every_head_and_refuses_an_unknown_mask() -> None:
    sizes = zip(HEAD_NAMES, head_sizes(2), strict=True)
    masks = {f"{name}_mask": torch.ones(4, 1, size, dtype=torch.bool) for name, size in sizes}
    assert network(2)(*inputs(2, 4, 1), **masks)["op_logits"].shape == (4, 1, NUM_OPS)
    with pytest.raises(TypeError, match="no mask named pace_mask"):
        network(2)(*inputs(2, 4, 1), pace_mask=masks["op_mask"])


def test_deterministic_actions_are_repeatable_and_sampled_actions_choose_a_legal_slot() -> None:
    policy, (state, blueprints) = network(5), inputs(5, 8)
    masks = compute_batch_masks(SlotTable.empty(8, 5), space_of(5))
    hidden = policy.get_initial_hidden(8, torch.device("cpu"))
    first, second = (
        policy.get_action(state, blueprints, hidden, masks, deterministic=True) for _ in range(2)
    )
    assert torch.equal(first.actions, second.actions)
    drawn = policy.get_action(state, blueprints, hidden, masks, uniforms=torch.rand(8, 8))
    assert set(drawn.actions[:, Head.SLOT].tolist()) <= set(range(5))


def test_initial_lstm_state_is_zero_and_changes_after_a_step() -> None:
    policy = network(2)
    hidden = policy.get_initial_hidden(4)
    assert [float(part.abs().sum()) for part in hidden] == [0.0, 0.0]
    with torch.no_grad():
        later = policy(*inputs(2, 4, 1), hidden=hidden)["hidden"]
    assert [float(part.abs().sum()) > 0 for part in later] == [True, True]


def test_max_entropies_are_the_logarithms_of_head_sizes_and_at_least_1() -> None:
    found = network(8).max_entropies
    assert found["slot"] == pytest.approx(math.log(8))
    assert found["op"] == pytest.approx(math.log(6))
    assert network(2).max_entropies["slot"] == 1.0  # The logarithm of 2 is 0.69.


def test_critic_evaluates_the_op_that_is_passed_as_op_for_value_or_as_sampled_op() -> None:
    policy, (state, blueprints) = network(3, critic="op_value"), inputs(3, 2, 4)
    ops = torch.zeros(2, 4, dtype=torch.int64)
    waited = policy(state, blueprints, op=ops)
    other = policy(state, blueprints, op=ops, op_for_value=ops + 3)
    assert torch.equal(waited["slot_logits"], other["slot_logits"])
    assert not torch.equal(waited["value"], other["value"])
    actions = torch.tensor(CANONICAL_ACTION).expand(2, 4, 8)
    masks = torch.ones(2, 4, sum(head_sizes(3)), dtype=torch.bool)
    stored = (state, blueprints, actions, masks, policy.get_initial_hidden(2), torch.zeros(2, 4, dtype=bool))
    evaluated = [policy.evaluate_actions(*stored, sampled_op=op).value for op in (None, ops, ops + 3)]
    assert torch.equal(evaluated[0], waited["value"])
    assert torch.equal(evaluated[1], waited["value"])
    assert torch.equal(evaluated[2], other["value"])


@pytest.mark.parametrize("strict", [True, False])
def test_weights_for_three_slots_are_refused_by_a_network_for_five_slots(strict: bool) -> None:
    with pytest.raises(RuntimeError, match="size mismatch"):
        network(5).load_state_dict(network(3).state_dict(), strict=strict)


def test_network_of_the_specification_has_133_inputs_929762_parameters_and_two_class_names() -> None:
    slots = SlotConfig.default()
    assert FactoredRecurrentActorCriticV2 is FactoredRecurrentActorCritic
    policy = FactoredRecurrentActorCriticV2(
        get_feature_size(slots), slots.num_slots, critic="op_value", conditioned=False
    )
    # The 121 features are followed by an embedding of 4 numbers for the blueprint of each slot.
    assert policy.features[0].in_features == 121 + 3 * 4 == 133
    # Parameters of the blueprint embedding: 14·4 = 56.
    # Parameters of the linear layer and layer norm before the LSTM: 133·256 + 256 + 512 = 34,816.
    # Parameters of the LSTM: 4·256·(256 + 256) + 8·256 = 526,336.
    # Parameters of the layer norm after the LSTM: 512.
    # Parameters of all heads except blueprint and value: 7·(256·128 + 128) + 129·28 = 233,884.
    # Parameters of the blueprint head: 256·256 + 256 + 256·128 + 128 + 129·13 = 100,365.
    # Parameters of the value head: 262·128 + 128 + 129 = 33,793.
    assert count(policy) == 929_762
    # Without the op as input the value head has 6·128 = 768 parameters fewer.
    # With the op as input the slot head has 6·128 = 768 parameters more.
    # With op and slot as 6 + 3 inputs, five heads have 5·128·9 = 5,760 and the blueprint head 256·9 = 2,304
    # parameters more.
    policy = FactoredRecurrentActorCritic(121, 3)
    assert count(policy) == 929_762 - 768 + 768 + 5_760 + 2_304
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}


def test_evaluated_actions_have_one_log_probability_and_entropy_per_head() -> None:
    state, blueprints = inputs(5, 4, 3)
    sizes = head_sizes(5)
    actions = torch.stack([torch.randint(0, size, (4, 3)) for size in sizes], dim=-1)
    masks = torch.ones(4, 3, sum(sizes), dtype=torch.bool)
    fresh = torch.zeros(4, 3, dtype=torch.bool)
    policy = network(5)
    found = policy.evaluate_actions(state, blueprints, actions, masks, policy.get_initial_hidden(4), fresh)
    assert found.log_probs.shape == found.entropies.shape == (4, 3, 8)
    assert found.value.shape == (4, 3)


def test_action_without_a_blueprint_has_no_blueprint_id() -> None:
    assert BLUEPRINT_IDS[0] is None
    assert FactoredAction.from_indices(CANONICAL_ACTION).blueprint_id is None
    ids = [FactoredAction.from_indices([1, 0, b, 0, 0, 0, 0, 0]).blueprint_id for b in BlueprintAction]
    assert tuple(ids) == BLUEPRINT_IDS == (None, *(b.name.lower() for b in list(BlueprintAction)[1:]))


def test_ppo_agent_is_constructed_around_a_network_for_three_slots() -> None:
    agent = PPOAgent(network(3), TrainingConfig())
    assert agent.policy.num_slots == 3
