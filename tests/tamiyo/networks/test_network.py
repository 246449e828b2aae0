import math

import pytest
import torch
from torch import Tensor, nn

from esper.leyline import HEAD_NAMES, NUM_HEADS, AlphaTarget, LifecycleOp, SlotConfig, SlotTable, head_sizes
from esper.tamiyo.networks.factored_lstm import BlueprintEmbedding, Critic, FactoredRecurrentActorCritic
from esper.tamiyo.policy.action_masks import compute_batch_masks
from esper.tamiyo.policy.distributions import MASKED_LOG_PROB, EmptyMaskError
from esper.tamiyo.policy.features import get_feature_size
from tests.leyline.building import space_of
from tests.tamiyo.policy.small_policies import policy_of


def full_size(**options: object) -> FactoredRecurrentActorCritic:
    torch.manual_seed(0)
    return FactoredRecurrentActorCritic(state_dim=121, num_slots=3, **options)  # type: ignore[arg-type]


def linear(layer: nn.Module) -> nn.Linear:
    assert isinstance(layer, nn.Linear)
    return layer


@pytest.mark.parametrize(("num_slots", "conditioned"), [(1, True), (3, False), (5, True), (8, True)])
def test_forward_returns_logits_of_every_head_and_a_value(num_slots: int, conditioned: bool) -> None:
    policy = policy_of(num_slots, conditioned=conditioned)
    state = torch.randn(4, 7, get_feature_size(SlotConfig.of_count(num_slots)))
    result = policy(state, torch.full((4, 7, num_slots), -1))
    shapes = [tuple(result[f"{name}_logits"].shape) for name in HEAD_NAMES]
    assert shapes == [(4, 7, size) for size in (6, num_slots, 13, 4, 3, 3, 4, 5)]
    assert result["value"].shape == (4, 7)
    assert [part.shape for part in result["hidden"]] == [(1, 4, 32)] * 2
    assert (policy.num_slots, policy.sizes) == (num_slots, head_sizes(num_slots))


def test_initial_forget_biases_give_memories_of_1_to_63_steps_and_input_biases_are_their_negatives() -> None:
    lstm = full_size().lstm
    bias = lstm.bias_ih_l0.detach()
    closing, forget, rest = bias[:256], bias[256:512], bias[512:]
    assert torch.equal(closing, -forget)
    assert rest.abs().max() == 0.0
    assert lstm.bias_hh_l0.abs().max() == 0.0
    # With forget bias ln T a cell keeps sigmoid(ln T) = T / (T + 1) of its content per step.
    assert forget.min() >= 0.0
    assert forget.max() <= math.log(63.0)
    memories = forget.exp()
    assert torch.histc(memories, 4, 1.0, 63.0).min() > 256 / 4 / 2, "memories are spread evenly"


def test_initial_recurrent_weights_are_orthogonal_and_embeddings_small() -> None:
    policy = full_size()
    weight = policy.lstm.weight_hh_l0.detach()
    assert torch.allclose(weight.T @ weight, torch.eye(256), atol=1e-4)
    trunk = linear(policy.features[0]).weight.detach()
    assert torch.allclose(trunk.T @ trunk, 2.0 * torch.eye(133), atol=1e-4), "gain √2"
    assert 0.01 < policy.blueprints.embedding.weight.std() < 0.03


def test_initial_gain_of_the_last_layer_is_0_01_for_action_heads_and_1_for_the_value_head() -> None:
    policy = full_size()
    for name, head in policy.heads.items():
        weight = linear(head[-1]).weight.detach()
        assert torch.allclose(weight @ weight.T, 1e-4 * torch.eye(len(weight)), atol=1e-7), name
    value = linear(policy.value_head[-1])
    assert value.weight.norm().item() == pytest.approx(1.0, abs=1e-5)
    assert value.bias.item() == 0.0


def test_initial_biases_favour_wait_and_full_alpha_and_disfavour_prune() -> None:
    policy = full_size()
    biases = {name: linear(head[-1]).bias.detach() for name, head in policy.heads.items()}
    assert biases["op"].tolist() == [1.0, 0.0, 0.0, -2.0, 0.0, 0.0]
    assert biases["alpha_target"].tolist() == [0.0, 0.0, 1.0]
    others = [bias for name, bias in biases.items() if name not in ("op", "alpha_target")]
    assert all(bias.abs().max() == 0.0 for bias in others)
    assert (LifecycleOp.WAIT, LifecycleOp.PRUNE, AlphaTarget.FULL) == (0, 3, 2)


def test_blueprint_embedding_of_an_empty_slot_is_the_vector_for_empty_slots() -> None:
    embedding = BlueprintEmbedding()
    rows = embedding(torch.tensor([[-1, 7, 0]]))
    assert rows.shape == (1, 3, 4)
    weight = embedding.embedding.weight
    assert torch.equal(rows[0], torch.stack([weight[13], weight[7], weight[0]]))
    assert dict(embedding.named_buffers())["null_index"].item() == 13


def logits(policy: FactoredRecurrentActorCritic, op: int, slot: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(2, 1, 121, generator=generator)
    with torch.no_grad():
        result = policy(
            state, torch.full((2, 1, 3), -1), op=torch.full((2, 1), op), slot=torch.full((2, 1), slot)
        )
    return {name: result[f"{name}_logits"] for name in HEAD_NAMES} | {"value": result["value"]}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


LATER = set(HEAD_NAMES) - {"op", "slot"}


def test_logits_of_conditioned_heads_depend_on_the_chosen_op_and_slot() -> None:
    policy = policy_of(conditioned=True)
    assert changed(logits(policy, 1, 0), logits(policy, 2, 0)) == {"slot"} | LATER
    assert changed(logits(policy, 1, 0), logits(policy, 1, 2)) == LATER


@pytest.mark.parametrize(("critic", "expected"), [("op_value", {"value"}), ("state_value", set())])
def test_critic_value_depends_on_the_op_if_and_only_if_the_critic_is_op_value(
    critic: Critic, expected: set[str]
) -> None:
    policy = policy_of(conditioned=False, critic=critic)
    assert changed(logits(policy, 1, 0), logits(policy, 2, 0)) == expected


def test_forward_masks_all_heads_and_samples_op_and_slot_if_not_given() -> None:
    policy, rng = policy_of(), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    masks = {
        f"{name}_mask": torch.rand(300, 1, size, generator=rng) < 0.5
        for name, size in zip(HEAD_NAMES, policy.sizes, strict=True)
    }
    for mask in masks.values():
        mask[..., 1] = True
    state, blueprints = torch.randn(300, 1, 121, generator=rng), torch.full((300, 1, 3), -1)
    result = policy(state, blueprints, **masks)
    drawn = {"op": result["op"], "slot": result["slot"]}
    free = policy(state, blueprints, **drawn)
    for name in HEAD_NAMES:
        mask = masks[f"{name}_mask"]
        expected = torch.where(mask, free[f"{name}_logits"], MASKED_LOG_PROB)
        assert torch.equal(result[f"{name}_logits"], expected), name
    for name, values in drawn.items():
        assert masks[f"{name}_mask"].gather(-1, values.unsqueeze(-1)).all()
        assert len(values.unique()) == policy.sizes[HEAD_NAMES.index(name)]
    assert torch.equal(free["op"], drawn["op"])


def test_forward_raises_for_an_empty_mask_and_an_unknown_mask_name() -> None:
    state, blueprints = torch.randn(1, 1, 121), torch.full((1, 1, 3), -1)
    with pytest.raises(EmptyMaskError):
        policy_of()(state, blueprints, tempo_mask=torch.zeros(1, 1, 3, dtype=torch.bool))
    with pytest.raises(TypeError, match="no mask named temp_mask"):
        policy_of()(state, blueprints, temp_mask=torch.ones(1, 1, 3, dtype=torch.bool))


def test_get_value_without_op_raises_if_the_critic_is_op_value() -> None:
    policy = policy_of(critic="op_value")
    state, blueprints = torch.randn(2, 121), torch.full((2, 3), -1)
    hidden = policy.get_initial_hidden(2)
    with pytest.raises(ValueError, match="op that will be taken"):
        policy.get_value(state, blueprints, hidden)
    values = [policy.get_value(state, blueprints, hidden, torch.full((2,), op)) for op in (0, 1)]
    assert (values[0] != values[1]).all()


def test_decisions_of_a_policy_without_recurrence_do_not_depend_on_earlier_steps() -> None:
    policy = policy_of(recurrent=False)
    state, blueprints = torch.randn(1, 6, 121), torch.full((1, 6, 3), -1)
    before, _ = policy.encode(state, blueprints, policy.get_initial_hidden(1))
    state[:, :5] += 1.0
    after, _ = policy.encode(state, blueprints, policy.get_initial_hidden(1))
    assert torch.equal(before[:, 5], after[:, 5])
    assert not torch.equal(before[:, 4], after[:, 4])


def test_get_action_raises_if_neither_uniforms_nor_deterministic_is_given() -> None:
    policy = policy_of()
    masks = compute_batch_masks(SlotTable.empty(1, 3), space_of())
    with pytest.raises(ValueError, match=f"uniforms .env, {NUM_HEADS}."):
        policy.get_action(torch.zeros(1, 121), torch.full((1, 3), -1), policy.get_initial_hidden(1), masks)
