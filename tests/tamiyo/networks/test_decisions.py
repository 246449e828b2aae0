from itertools import product

import pytest
import torch
from torch import Tensor

from esper.leyline import (
    CANONICAL_ACTION,
    HEAD_NAMES,
    HEADS_OF_OP,
    NUM_HEADS,
    Head,
    LifecycleOp,
    SlotTable,
    head_sizes,
)
from esper.tamiyo.networks.factored_lstm import Critic, FactoredRecurrentActorCritic
from esper.tamiyo.policy.action_masks import compute_batch_masks
from tests.leyline.building import space_of
from tests.tamiyo.policy.small_policies import busy_table, play, policy_of

VARIANTS = list(product(["state_value", "op_value"], [True, False]))


def fresh_flags() -> Tensor:
    """Return bool ``[env, step]`` of episode starts, with a second start at step 4 or step 6."""
    fresh = torch.zeros(3, 9, dtype=torch.bool)
    fresh[:, 0] = True
    fresh[0, 4] = fresh[1, 6] = True
    return fresh


@pytest.mark.parametrize(("critic", "conditioned"), VARIANTS)
def test_evaluate_actions_reproduces_log_probs_and_values_of_the_rollout(
    critic: Critic, conditioned: bool
) -> None:
    policy = policy_of(critic=critic, conditioned=conditioned)
    played = play(policy, fresh_flags())
    evaluated = policy.evaluate_actions(*played.sequences)
    torch.testing.assert_close(evaluated.log_probs, played.log_probs, atol=1e-5, rtol=0.0)
    torch.testing.assert_close(evaluated.value, played.values, atol=1e-5, rtol=0.0)
    assert (played.log_probs.sum(dim=-1) < -0.1).any(), "some decisions had a choice"
    assert len(played.actions[..., Head.OP].unique()) >= 4


def test_evaluation_of_a_rollout_from_mid_episode_uses_its_stored_lstm_state() -> None:
    policy = policy_of()
    going_on = fresh_flags()
    going_on[:, 0] = False
    played = play(policy, going_on)
    evaluated = policy.evaluate_actions(*played.sequences)
    torch.testing.assert_close(evaluated.log_probs, played.log_probs, atol=1e-5, rtol=0.0)
    forgotten = policy.evaluate_actions(*played.sequences[:4], policy.get_initial_hidden(3), going_on)
    assert not torch.allclose(forgotten.log_probs, played.log_probs, atol=1e-5), (
        "the start state has an effect"
    )


def test_policy_decisions_do_not_depend_on_the_previous_episode() -> None:
    policy = policy_of(critic="op_value")
    fresh = fresh_flags()
    played = play(policy, fresh)
    before = policy.evaluate_actions(*played.sequences)
    played.state[0, :4] += 1.0
    played.hidden[0][:, 0] += 1.0
    after = policy.evaluate_actions(*played.sequences)
    assert torch.equal(before.log_probs[0, 4:], after.log_probs[0, 4:])
    assert torch.equal(before.value[0, 4:], after.value[0, 4:])
    assert not torch.equal(before.value[0, :4], after.value[0, :4])
    assert torch.equal(before.value[1:], after.value[1:]), "other environments do not change"


def test_critic_values_depend_on_observations_of_earlier_steps_of_the_episode() -> None:
    policy = policy_of()
    played = play(policy, fresh_flags())
    before = policy.evaluate_actions(*played.sequences)
    played.state[2, 0] += 1.0
    after = policy.evaluate_actions(*played.sequences)
    assert (before.value[2, 1:] != after.value[2, 1:]).all()


def test_stored_masks_allow_the_chosen_values_and_show_which_heads_had_a_choice() -> None:
    policy = policy_of()
    played = play(policy, fresh_flags())
    parts = played.masks.split(list(head_sizes(3)), dim=-1)
    for head, mask in enumerate(parts):
        assert mask.gather(-1, played.actions[..., head : head + 1]).all(), HEAD_NAMES[head]
    evaluated = policy.evaluate_actions(*played.sequences)
    choices = torch.stack([mask.sum(dim=-1) > 1 for mask in parts], dim=-1)
    assert torch.equal(evaluated.has_choice, choices)
    assert (played.log_probs[~choices] == 0.0).all()
    assert (evaluated.entropies[~choices] == 0.0).all()
    assert (evaluated.entropies[choices] > 0.0).all()


def test_sampled_actions_have_canonical_values_in_heads_that_the_op_does_not_read() -> None:
    played = play(policy_of(), fresh_flags())
    read = torch.from_numpy(HEADS_OF_OP.copy())[played.actions[..., Head.OP]]
    canonical = torch.from_numpy(CANONICAL_ACTION.copy()).expand_as(played.actions)
    assert torch.equal(played.actions[~read], canonical[~read])
    assert (played.log_probs[~read] == 0.0).all()


def all_open(policy: FactoredRecurrentActorCritic, op: LifecycleOp) -> tuple[Tensor, ...]:
    """Return actions and masks of one step in four environments, all with the op ``op``.

    The returned masks leave a choice only to heads that the op reads.
    """
    actions = torch.from_numpy(CANONICAL_ACTION.copy()).repeat(4, 1, 1)
    actions[..., Head.OP] = op
    masks = []
    for head, size in enumerate(policy.sizes):
        mask = torch.zeros(4, 1, size, dtype=torch.bool)
        mask[...] = bool(HEADS_OF_OP[op, head])
        mask.scatter_(-1, actions[..., head : head + 1], True)
        masks.append(mask)
    return actions, torch.cat(masks, dim=-1)


@pytest.mark.parametrize("conditioned", [True, False])
@pytest.mark.parametrize("op", LifecycleOp)
def test_only_heads_that_the_op_reads_get_a_gradient(op: LifecycleOp, conditioned: bool) -> None:
    policy = policy_of(conditioned=conditioned)
    actions, masks = all_open(policy, op)
    state, blueprints = torch.randn(4, 1, 121), torch.full((4, 1, 3), -1)
    fresh = torch.ones(4, 1, dtype=torch.bool)
    evaluated = policy.evaluate_actions(
        state, blueprints, actions, masks, policy.get_initial_hidden(4), fresh
    )
    evaluated.log_probs.sum().backward()
    moved = {
        name
        for name, head in policy.heads.items()
        if any(p.grad is not None and p.grad.abs().max() > 1e-6 for p in head.parameters())
    }
    assert moved == {HEAD_NAMES[head] for head in range(NUM_HEADS) if HEADS_OF_OP[op, head]}
    assert all(p.grad is None or p.grad.abs().max() == 0.0 for p in policy.value_head.parameters())


def test_value_gradient_reaches_value_head_lstm_and_embeddings() -> None:
    policy = policy_of()
    played = play(policy, fresh_flags())
    policy.evaluate_actions(*played.sequences).value.sum().backward()
    for part in (policy.value_head, policy.lstm, policy.features, policy.blueprints):
        gradients = [p.grad for p in part.parameters()]
        assert all(g is not None and g.abs().max() > 0.0 for g in gradients)


def test_deterministic_decisions_are_the_argmax_of_each_head_and_repeatable() -> None:
    policy = policy_of(4)
    masks = compute_batch_masks(busy_table(5), space_of(4))
    generator = torch.Generator().manual_seed(0)
    state, blueprints = torch.randn(5, 151, generator=generator), torch.full((5, 4), -1)
    hidden = policy.get_initial_hidden(5)
    with torch.no_grad():
        first, second = (
            policy.get_action(state, blueprints, hidden, masks, deterministic=True) for _ in range(2)
        )
        encoded, _ = policy.encode(state.unsqueeze(1), blueprints.unsqueeze(1), hidden)
    assert torch.equal(first.actions, second.actions)
    op_logits = policy.heads["op"](encoded.squeeze(1)).masked_fill(~masks.op, -1e9)
    assert torch.equal(first.actions[:, Head.OP], op_logits.argmax(dim=-1))


def test_each_uniform_random_number_affects_the_sample_of_one_head() -> None:
    policy = policy_of(4)
    masks = compute_batch_masks(SlotTable.empty(1, 4), space_of(4))
    masks.slot_by_op[:, LifecycleOp.WAIT] = False  # All slots are empty, and GERMINATE is the only legal op.
    state, blueprints = torch.zeros(1, 151), torch.full((1, 4), -1)

    def decide(uniforms: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = policy.get_initial_hidden(1)
            return policy.get_action(state, blueprints, hidden, masks, uniforms=uniforms).actions[0]

    low = torch.zeros(1, NUM_HEADS)
    base = decide(low)
    assert base[Head.OP] == LifecycleOp.GERMINATE
    for head in (Head.SLOT, Head.BLUEPRINT, Head.STYLE, Head.TEMPO, Head.ALPHA_TARGET):
        high = low.clone()
        high[0, head] = 0.999
        moved = torch.nonzero(decide(high) != base).flatten().tolist()
        assert moved == [head]
