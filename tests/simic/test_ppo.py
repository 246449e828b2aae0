from functools import cache

import pytest
import torch

from esper.leyline import HEAD_NAMES, Head
from esper.simic import losses
from esper.simic.advantages import gae, normalise
from esper.simic.agent.ppo import PolicyDivergedError, PPOAgent, has_choice, shards
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.training.rollout import ActionStreams, collect
from tests.simic.oracles.lifecycle_envs import Lifecycle
from tests.simic.oracles.toy_envs import Bandit, Memory, Rent
from tests.simic.rollouts import agent_of, gradients, roll, weights

UNCLIPPED = {"update_epochs": 1, "max_grad_norm": 1e9}


# --- gradient of the policy ---------------------------------------------------------------------------


def test_update_on_a_rollout_of_forced_decisions_does_not_change_the_policy() -> None:
    policy, buffer = roll(Memory)
    forced = TamiyoRolloutBuffer.join([buffer])
    for name in ("masks", "log_probs", "actions"):  # At step 0 of the Memory oracle only WAIT is legal.
        getattr(forced, name)[...] = getattr(buffer, name)[:, :1]
    agent = agent_of(policy, value_coefficient=0.0)
    before = weights(agent)
    metrics = agent.update(forced, 0.0)
    assert metrics.forced_share == 1.0
    assert torch.equal(weights(agent), before)
    assert metrics.head_grad_norm == [0.0] * 8
    assert metrics.head_entropy == [None] * 8


def test_advantages_of_forced_decisions_do_not_change_the_policy_gradient() -> None:
    policy, buffer = roll(Memory)
    free = has_choice(buffer.masks, policy.sizes)
    assert free.nonzero()[:, 1].unique().tolist() == [50], "only the last step has a choice"

    def gradient(advantages: torch.Tensor) -> torch.Tensor:
        agent = agent_of(policy)
        evaluated = agent.policy.evaluate_actions(*buffer.get_batched_sequences())
        losses.policy_loss(
            evaluated.log_probs, buffer.log_probs, advantages, clip=0.2, rows=1
        ).loss.backward()
        return gradients(agent)

    advantages = torch.where(free, 1.0, 0.0)
    assert torch.equal(gradient(advantages), gradient(torch.where(free, advantages, 50.0)))
    assert gradient(advantages).abs().max() > 0.0


def test_reported_policy_loss_is_a_mean_over_decisions_that_are_not_forced() -> None:
    # In the first update epoch every ratio is 1, and normalised advantages have mean 0 over decisions that
    # are not forced.
    policy, buffer = roll(Memory, num_envs=8)
    metrics = agent_of(policy, update_epochs=1).update(buffer, 0.0)
    assert metrics.policy_loss == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(("critic", "conditioned"), [("state_value", True), ("op_value", False)])
def test_every_head_that_an_op_reads_gets_a_gradient(critic: str, conditioned: bool) -> None:
    policy, buffer = roll(Lifecycle, num_envs=16, critic=critic, conditioned=conditioned)
    assert {1, 2, 3} <= set(buffer.actions[..., Head.OP].unique().tolist()), "ops that read all heads"
    agent = agent_of(policy)
    metrics = agent.update(buffer, 0.0)
    assert all(norm > 1e-6 for norm in metrics.head_grad_norm), metrics.head_grad_norm
    assert all(entropy is not None for entropy in metrics.head_entropy)
    moved = {
        name: not torch.equal(mine, theirs)
        for (name, mine), theirs in zip(agent.policy.named_parameters(), policy.parameters(), strict=True)
    }
    assert all(moved.values()), [name for name, has_moved in moved.items() if not has_moved]


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 2e-3},
        {"update_epochs": 3},
        {"clip": 0.01},
        {"clip_per_head": True},
        {"target_kl": 1e-6},
        {"gamma": 0.9},
        {"lam": 0.5},
        {"entropy_start": 0.5},
        {"entropy_end": 0.5},
        {"entropy_floor": 1.0},
        {"value_coefficient": 5.0},
        {"value_clip": 0.001},
        {"max_grad_norm": 0.01},
        {"envs_per_backward": 3},
    ],
)
def test_changing_any_hyper_parameter_changes_the_weights_after_an_update(change: dict[str, float]) -> None:
    agent = agent_of(roll()[0], **change)
    agent.update(roll()[1], 0.5)
    assert not torch.equal(weights(agent), usual_weights())


@cache
def usual_weights() -> torch.Tensor:
    """Return the policy's weights after an update with default settings, halfway through a training."""
    policy, buffer = roll()
    agent = agent_of(policy)
    agent.update(buffer, 0.5)
    return weights(agent)


def blueprint_entropy_while_learning(floor: float, iterations: int) -> list[float]:
    """Return the entropy of the blueprint head by iteration, on the bandit oracle."""
    settings = {"entropy_start": 0.0, "entropy_end": 0.0, "learning_rate": 5e-3, "target_kl": 0.1}
    agent = agent_of(roll(Bandit)[0], entropy_floor=floor, **settings)
    env, streams = Bandit(3, range(16)), ActionStreams(3, range(16))
    rollouts = (collect(env, agent.policy, streams) for _ in range(iterations))
    metrics = [agent.update(buffer, number / 15) for number, buffer in enumerate(rollouts)]
    return [float(update.head_entropy[Head.BLUEPRINT] or 0.0) for update in metrics]


def test_entropy_floor_keeps_a_head_exploring_in_the_first_80_percent_of_training() -> None:
    assert min(blueprint_entropy_while_learning(0.0, 8)) < 0.1
    kept = blueprint_entropy_while_learning(0.3, 15)
    assert min(kept[:12]) > 0.2
    assert kept[-1] < 0.1


@pytest.mark.parametrize(("progress", "coefficient"), [(0.0, 0.02), (0.5, 0.011), (1.0, 0.002)])
def test_entropy_coefficient_is_interpolated_linearly_over_the_training(
    progress: float, coefficient: float
) -> None:
    policy, buffer = roll(Rent)
    sliding, fixed = agent_of(policy), agent_of(policy, entropy_start=coefficient, entropy_end=coefficient)
    for agent in (sliding, fixed):
        agent.update(buffer, progress)
    torch.testing.assert_close(weights(sliding), weights(fixed), atol=1e-7, rtol=0.0)


def test_optimiser_of_the_policy_is_adam_with_epsilon_1e_minus_5() -> None:
    """The first Adam step lr · g / (|g| + eps) is smaller than lr for gradients g of the size of eps.

    With torch's default eps of 1e-8, gradient noise of 1e-6 would move weights by the full learning rate lr.
    """
    agent = agent_of(roll(Rent)[0], learning_rate=0.01)
    before = weights(agent)
    for weight in agent.policy.parameters():
        weight.grad = torch.full_like(weight, 1e-6)
    agent.optimiser.step()
    assert (before - weights(agent)).mean().item() == pytest.approx(0.01 * 1e-6 / (1e-6 + 1e-5), rel=1e-2)


# --- shards ----------------------------------------------------------------------------------------


def test_shards_are_consecutive_environments_and_the_last_shard_may_be_smaller() -> None:
    assert [range(10)[shard] for shard in shards(10, 4)] == [range(4), range(4, 8), range(8, 10)]
    assert [range(3)[shard] for shard in shards(3, 8)] == [range(3)]


@pytest.mark.parametrize("envs_per_backward", [1, 5, 99])
def test_policy_gradient_does_not_depend_on_the_number_of_environments_per_shard(
    envs_per_backward: int,
) -> None:
    policy, buffer = roll(Lifecycle, num_envs=10)
    whole, split = (agent_of(policy, **UNCLIPPED, envs_per_backward=size) for size in (10, envs_per_backward))
    metrics = [agent.update(buffer, 0.0) for agent in (whole, split)]
    torch.testing.assert_close(gradients(split), gradients(whole), atol=1e-6, rtol=0.0)
    assert gradients(whole).abs().max() > 1e-2
    assert metrics[0].policy_loss == pytest.approx(metrics[1].policy_loss, abs=1e-6)
    assert metrics[0].value_loss == pytest.approx(metrics[1].value_loss, abs=1e-6)
    assert metrics[0].entropy == pytest.approx(metrics[1].entropy, abs=1e-5)
    assert metrics[0].head_grad_norm == pytest.approx(metrics[1].head_grad_norm, abs=1e-6)


def shard_gradient(agent: PPOAgent, buffer: TamiyoRolloutBuffer, shard: slice) -> torch.Tensor:
    """Return the gradient of one shard in the first update epoch, divided by the steps of the rollout."""
    b, config = buffer, agent.config
    advantages = gae(
        b.rewards, b.values, b.next_values, b.terminated, b.ended, gamma=config.discount, lam=config.lam
    )
    free = has_choice(b.masks, agent.policy.sizes)
    rows = int(free.sum())
    returns = (advantages + b.values)[shard]
    advantages = normalise(advantages, free)[shard]
    evaluated = agent.policy.evaluate_actions(*b.get_batched_sequences(shard))
    policy = losses.policy_loss(evaluated.log_probs, b.log_probs[shard], advantages, clip=0.2, rows=rows).loss
    value = losses.value_loss(evaluated.value, b.values[shard], returns, clip=None, rows=free.numel())
    bonus = losses.entropy_bonus(evaluated.entropies, evaluated.has_choice, rows=rows)
    (policy + 0.5 * value - 0.02 * bonus).backward()
    return gradients(agent)


def test_sum_of_shard_gradients_in_order_is_bit_identical_to_the_policy_gradient() -> None:
    policy, buffer = roll(Lifecycle, num_envs=10)
    together = agent_of(policy, **UNCLIPPED, envs_per_backward=4)
    together.update(buffer, 0.0)
    parts = [shard_gradient(agent_of(policy), buffer, shard) for shard in shards(10, 4)]
    assert torch.equal(gradients(together), parts[0] + parts[1] + parts[2])


# --- stop of an update by its KL divergence -----------------------------------------------------------


def test_first_update_epoch_takes_a_gradient_step_even_if_the_kl_limit_is_exceeded() -> None:
    policy, buffer = roll(Rent)
    agent = agent_of(policy, target_kl=1e-12)
    assert agent.update(buffer, 0.0).early_stop_update_epoch == 1
    assert not torch.equal(weights(agent), weights(agent_of(policy)))


# --- metrics ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("oracle", "critic"), [(Lifecycle, "op_value"), (Memory, "state_value")])
def test_probability_ratios_in_the_first_update_epoch_are_1_before_and_after_an_episode_end(
    oracle: type[Memory], critic: str
) -> None:
    policy, buffer = roll(oracle, episodes=2, critic=critic)
    assert buffer.ended.sum().item() == 2 * 4
    metrics = agent_of(policy).update(buffer, 0.0)
    assert metrics.first_ratio_error < 1e-5
    assert metrics.skipped is None


def test_ratios_kl_clip_fraction_and_entropies_of_one_update_are_in_plausible_ranges() -> None:
    policy, buffer = roll(Lifecycle, num_envs=8)
    metrics = agent_of(policy).update(buffer, 0.0)
    assert metrics.ratio_min < 1.0 < metrics.ratio_max
    assert metrics.ratio_std > 0.0
    assert 0.0 < metrics.approx_kl < 0.1
    assert 0.0 <= metrics.clip_fraction < 0.5
    assert metrics.entropy > 0.0
    assert all(e is not None and 0.0 < e <= 1.0 + 1e-6 for e in metrics.head_entropy)
    free = has_choice(buffer.masks, policy.sizes)
    assert metrics.forced_share == pytest.approx(1.0 - free.float().mean().item())
    assert metrics.value_return_correlation is not None
    assert metrics.explosion is None


def test_clip_fraction_is_the_share_of_decisions_with_a_ratio_outside_the_clipping_range() -> None:
    policy, buffer = roll(Memory, num_envs=4)
    # The ratio is e^0.5 = 1.65 in three of the four decisions that are not forced.
    buffer.log_probs[:3, 50, Head.SLOT] -= 0.5
    metrics = agent_of(policy, update_epochs=1).update(buffer, 0.0)
    assert metrics.clip_fraction == pytest.approx(0.75)
    assert metrics.ratio_max == pytest.approx(1.6487, abs=1e-3)
    assert metrics.first_ratio_error == pytest.approx(0.6487, abs=1e-3)


def test_reported_gradient_norms_are_measured_before_clipping() -> None:
    policy, buffer = roll(Lifecycle, num_envs=8)
    free, tight = (agent_of(policy, update_epochs=1, max_grad_norm=limit) for limit in (1e9, 1e-3))
    loose_metrics, tight_metrics = free.update(buffer, 0.0), tight.update(buffer, 0.0)
    assert loose_metrics.grad_norm == pytest.approx(gradients(free).norm().item(), rel=1e-5)
    assert tight_metrics.grad_norm == loose_metrics.grad_norm
    assert tight_metrics.head_grad_norm == loose_metrics.head_grad_norm
    assert gradients(tight).norm().item() == pytest.approx(1e-3, rel=1e-3)
    blueprint = free.policy.heads["blueprint"]
    expected = torch.cat([p.grad.flatten() for p in blueprint.parameters() if p.grad is not None]).norm()
    assert loose_metrics.head_grad_norm[Head.BLUEPRINT] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("change", [-4.0, 4.0])
def test_exploding_probability_ratio_is_reported_with_environment_step_and_head(change: float) -> None:
    policy, buffer = roll(Lifecycle, num_envs=6)
    chose = buffer.log_probs[..., Head.BLUEPRINT] < 0.0
    env, step = chose.nonzero()[-1].tolist()
    buffer.log_probs[env, step, Head.BLUEPRINT] += change
    metrics = agent_of(policy, update_epochs=1).update(buffer, 0.0)
    found = metrics.explosion
    assert found is not None
    assert (found.env, found.step, found.head) == (env, step, "blueprint")
    assert found.action == buffer.actions[env, step, Head.BLUEPRINT].item()
    assert found.ratio == pytest.approx(torch.tensor(-change).exp().item(), rel=1e-3)
    assert found.new_log_prob - found.old_log_prob == pytest.approx(-change, rel=1e-3)


def test_exploding_probability_ratio_that_stops_the_update_is_reported() -> None:
    policy, buffer = roll(Lifecycle, num_envs=6)
    metrics = agent_of(policy, learning_rate=0.3).update(buffer, 0.0)
    assert metrics.early_stop_update_epoch == 1
    assert metrics.explosion is not None
    assert metrics.explosion.head in HEAD_NAMES
    assert metrics.ratio_max > 5.0 or metrics.ratio_min < 0.1


# --- non-finite numbers ------------------------------------------------------------------------------


def broken(buffer: TamiyoRolloutBuffer) -> TamiyoRolloutBuffer:
    """Return a copy of the rollout with one NaN reward."""
    copy = TamiyoRolloutBuffer.join([buffer])
    copy.rewards[2, 3] = torch.nan
    return copy


@pytest.mark.parametrize("name", ["rewards", "values", "next_values"])
def test_update_with_a_non_finite_reward_or_value_is_skipped_and_reports_environment_and_step(
    name: str,
) -> None:
    policy, buffer = roll(Rent)
    getattr(buffer, name)[1, 0] = torch.inf
    agent = agent_of(policy)
    assert agent.update(buffer, 0.0).skipped == f"{name[:-1]} of environment 1 at step 0 is inf"
    assert torch.equal(weights(agent), weights(agent_of(policy)))
    assert agent.optimiser.state_dict()["state"] == {}


def test_non_finite_log_probability_skips_the_update_epoch() -> None:
    policy, buffer = roll(Rent)
    buffer.log_probs[1, 2, 0] = torch.nan
    agent = agent_of(policy)
    metrics = agent.update(buffer, 0.0)
    assert metrics.skipped is not None
    assert "update epoch 0" in metrics.skipped
    assert metrics.explosion is not None
    assert (metrics.explosion.env, metrics.explosion.step, metrics.explosion.head) == (1, 2, "op")
    assert torch.equal(weights(agent), weights(agent_of(policy)))


def test_three_skipped_updates_in_a_row_raise_an_error_and_leave_the_policy_unchanged() -> None:
    policy, buffer = roll(Rent)
    agent = agent_of(policy)
    for _ in range(2):
        agent.update(broken(buffer), 0.0)
    with pytest.raises(PolicyDivergedError, match=r"3 updates in a row.*reward of environment 2"):
        agent.update(broken(buffer), 0.0)
    assert torch.equal(weights(agent), weights(agent_of(policy)))


def test_successful_update_resets_the_count_of_skipped_updates() -> None:
    policy, buffer = roll(Rent)
    agent = agent_of(policy)
    for _ in range(2):
        agent.update(broken(buffer), 0.0)
    assert agent.update(buffer, 0.0).skipped is None
    for _ in range(2):
        agent.update(broken(buffer), 0.0)
    assert agent.skipped_in_a_row == 2


def test_update_that_is_non_finite_after_its_first_gradient_step_counts_as_skipped() -> None:
    policy, buffer = roll(Rent)
    agent = agent_of(policy, learning_rate=1e30)
    for _ in range(2):
        assert "update epoch 1" in str(agent.update(buffer, 0.0).skipped)
        agent.policy.load_state_dict(policy.state_dict())
    with pytest.raises(PolicyDivergedError):
        agent.update(buffer, 0.0)
