"""Functions that collect rollouts of small policies on oracle environments."""

from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.config import PPOConfig
from esper.simic.training.rollout import ActionStreams, collect
from esper.tamiyo.networks.factored_lstm import FactoredRecurrentActorCritic, PolicyShape
from tests.simic.oracles.lifecycle_envs import Lifecycle
from tests.simic.oracles.trial import SMALL, OracleClass, new_policy

TINY = replace(SMALL, feature_dim=16, hidden_dim=16)


def roll(
    oracle: OracleClass = Lifecycle, num_envs: int = 4, episodes: int = 1, **shape: Any
) -> tuple[FactoredRecurrentActorCritic, TamiyoRolloutBuffer]:
    """Return a small policy and its rollout, by default on ``Lifecycle``, where every head has a choice."""
    policy, buffer = _rolled(oracle, num_envs, episodes, replace(TINY, **shape))
    return policy, TamiyoRolloutBuffer.join([buffer])


@cache
def _rolled(
    oracle: OracleClass, num_envs: int, episodes: int, shape: PolicyShape
) -> tuple[FactoredRecurrentActorCritic, TamiyoRolloutBuffer]:
    policy = new_policy(shape, 0)
    streams = ActionStreams(0, range(num_envs))
    return policy, collect(oracle(0, range(num_envs)), policy, streams, episodes)


def agent_of(policy: FactoredRecurrentActorCritic, **settings: Any) -> PPOAgent:
    """Return a PPO agent that trains a copy of ``policy``."""
    backward = {name: settings.pop(name) for name in ("envs_per_backward",) if name in settings}
    return PPOAgent(deepcopy(policy), PPOConfig(**settings), **backward)


def weights(agent: PPOAgent) -> Tensor:
    """Return all parameters of the policy as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in agent.policy.parameters()])


def gradients(agent: PPOAgent) -> Tensor:
    """Return the gradients of the last update epoch as one vector."""
    parts = [
        torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
        for p in agent.policy.parameters()
    ]
    return torch.cat(parts)
