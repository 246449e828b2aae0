"""FLOPs per second of a PPO update epoch (one gradient step), relative to those of a large matrix
multiplication."""

from dataclasses import replace

import torch
from torch import nn

from benchmarks.timing import GEMM_FLOPS, cpu_times, figure, gemm, gflops
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.config import PPOConfig
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic
from tests.simic.oracles.trial import SMALL, new_policy
from tests.tamiyo.policy.small_policies import play

NUM_ENVS, NUM_STEPS = 16, 150
SHAPE = replace(SMALL, feature_dim=256, hidden_dim=256)
LIMIT = 0.4


def epoch_flops(policy: FactoredRecurrentActorCritic) -> int:
    """Return the FLOPs of the matrix products in one update epoch, forward and backward.

    Each element of a weight matrix, also in the LSTM, costs one multiply-add per decision in the forward pass
    and two in the backward pass. The counter ``torch.utils.flop_counter`` gives the same FLOPs for linear
    layers, but does not count the fused LSTM of the CPU.
    """
    matrices = [
        parameter
        for module in policy.modules()
        if isinstance(module, nn.Linear | nn.LSTM)
        for parameter in module.parameters()
        if parameter.ndim == 2
    ]
    return 6 * NUM_ENVS * NUM_STEPS * sum(matrix.numel() for matrix in matrices)


def rollout(policy: FactoredRecurrentActorCritic, starts: torch.Tensor) -> TamiyoRolloutBuffer:
    """Return a rollout buffer of random decisions and rewards; ``starts [env, step]`` is True at the first
    step of each episode.
    """
    played = play(policy, starts)
    buffer = TamiyoRolloutBuffer(
        NUM_ENVS, NUM_STEPS, policy.shape.state_dim, policy.num_slots, policy.shape.hidden_dim
    )
    buffer.hidden = played.hidden
    for name in ("state", "blueprint_indices", "actions", "masks", "fresh", "log_probs", "values"):
        getattr(buffer, name).copy_(getattr(played, name))
    buffer.rewards.normal_()
    buffer.next_values[:, :-1] = played.values[:, 1:]
    buffer.ended[:, :-1] = starts[:, 1:]
    buffer.ended[:, -1] = True
    buffer.terminated.copy_(buffer.ended)
    buffer.length = NUM_STEPS
    return buffer


def bench_an_update_epoch_reaches_two_fifths_of_the_rate_of_a_matrix_product() -> None:
    """Measure a PPO update of one epoch, including advantages, diagnostics and the optimiser step."""
    policy = new_policy(SHAPE, 0)
    whole = torch.zeros(NUM_ENVS, NUM_STEPS, dtype=torch.bool)
    whole[:, 0] = True
    broken = whole.clone()
    broken[range(NUM_ENVS), 8 + 8 * torch.arange(NUM_ENVS)] = True
    # The learning rate is so small that the policy network does not change, so no update stops early because
    # of its KL divergence.
    agent = PPOAgent(policy, PPOConfig(update_epochs=1, learning_rate=1e-30))
    rollouts = {"whole episodes": rollout(policy, whole), "a breakdown in each": rollout(policy, broken)}

    times = cpu_times(
        {
            "product": gemm,
            **{name: lambda b=buffer: agent.update(b, 0.0) for name, buffer in rollouts.items()},
        },
        repeats=1,
    )

    flops = {"product": GEMM_FLOPS, **dict.fromkeys(rollouts, epoch_flops(policy))}
    rates = {name: gflops(flops[name], times[name]) for name in times}
    for name in rollouts:
        title = f"PPO update epoch over {NUM_ENVS} × {NUM_STEPS}, {name}"
        note = f"{times[name]:.0f} ms, {rates[name]:.0f} of {rates['product']:.0f} GFLOP/s"
        share = 100 * rates[name] / rates["product"]
        figure(title, share, "% of the GEMM rate", at_least=100 * LIMIT, note=note)
