"""Rollouts of a policy with sampled actions, and evaluations with argmax actions, on any ``PolicyEnv``."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline import NUM_HEADS, derive_seed
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.training.policy_env import PolicyEnv
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic, PolicyDecision
from esper.tamiyo.policy.controller import decide, policy_outputs


class ActionStreams:
    """Random numbers for sampled actions, one stream per environment and episode."""

    def __init__(self, rng_seed: int, env_indices: Sequence[int], episode: int = 0) -> None:
        self._generators = [
            torch.Generator().manual_seed(derive_seed(rng_seed, "env", env, "episode", episode, "policy"))
            for env in env_indices
        ]

    def draw(self) -> Tensor:
        """Return uniform random numbers ``[env, head]``, for sampling one action per environment."""
        return torch.stack([torch.rand(NUM_HEADS, generator=g) for g in self._generators])


def collect(
    env: PolicyEnv,
    policy: FactoredRecurrentActorCritic,
    streams: ActionStreams,
    episodes: int = 1,
    *,
    at_once: int | None = None,
) -> TamiyoRolloutBuffer:
    """Collect a rollout with sampled actions.

    For an episode that is truncated at the end of the rollout, the critic's value of the last state is
    stored.

    Args:
        env: Environments, which are reset first.
        policy: Policy that decides.
        streams: Random numbers of each environment.
        episodes: Length of the rollout, in horizons.
        at_once: Environments per forward pass of the policy, all unless given.
    """
    shape, num_envs = policy.shape, len(env.env_indices)
    buffer = TamiyoRolloutBuffer(
        num_envs, episodes * env.horizon, shape.state_dim, shape.num_slots, shape.hidden_dim
    )
    observation, hidden = env.reset(), buffer.hidden
    fresh = torch.ones(num_envs, dtype=torch.bool)

    def sample() -> PolicyDecision:
        """Sample one decision per environment, with the LSTM state reset where ``fresh [env]`` is true."""
        keep = (~fresh).float().view(1, -1, 1).to(hidden[0].device)
        memory = (hidden[0] * keep, hidden[1] * keep)
        return decide(policy, observation, memory, streams.draw(), at_once=at_once)

    for _ in range(buffer.num_steps):
        decision = sample()
        if buffer.length > 0:
            buffer.add_next_value(decision.value)
        buffer.add(observation.features, observation.blueprint_indices, decision, fresh)
        hidden = decision.hidden
        step = env.step(decision.actions.numpy(), policy_outputs(decision, policy.sizes))
        ended, terminated = torch.from_numpy(step.ended), torch.from_numpy(step.terminated)
        buffer.add_outcome(torch.from_numpy(step.reward).float(), ended, terminated)
        observation, fresh = step.observation, ended
    if not step.terminated.all():
        fresh = terminated
        buffer.add_next_value(sample().value)
    return buffer


def evaluate(
    env: PolicyEnv, policy: FactoredRecurrentActorCritic, *, at_once: int | None = None
) -> NDArray[np.float64]:
    """Return the undiscounted returns ``[env]`` of one episode with argmax actions per environment.

    ``at_once`` is the number of environments per forward pass of the policy, all unless given.
    """
    observation, num_envs = env.reset(), len(env.env_indices)
    hidden = policy.get_initial_hidden(num_envs)
    returns = np.zeros(num_envs)
    alive = np.ones(num_envs, dtype=np.bool_)
    for _ in range(env.horizon):
        decision = decide(policy, observation, hidden, at_once=at_once)
        hidden = decision.hidden
        step = env.step(decision.actions.numpy())
        returns += step.reward * alive
        alive &= ~step.ended
        observation = step.observation
    return returns
