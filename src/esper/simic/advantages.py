"""Advantage estimation: pure functions of tensors with the axes ``[env, step]``."""

import torch
from torch import Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    ended: Tensor,
    *,
    gamma: float,
    lam: float,
) -> Tensor:
    """Return generalised advantage estimates (GAE, Schulman et al. 2016); all tensors are ``[env, step]``.

    TD errors: d_t = r_t + gamma · (1 − terminated_t) · v'_t − v_t

    Advantages: A_t = d_t + gamma · lam · (1 − ended_t) · A_{t+1}, with A_T = 0

    ``next_values`` v'_t is the value of the state that step t reached, before any reset. A truncated episode
    bootstraps from ``next_values``, a terminated episode does not; ``ended`` is true in the last step of
    truncated and of terminated episodes.
    """
    continues = (~ended).to(values.dtype)
    deltas = rewards + gamma * (~terminated).to(values.dtype) * next_values - values
    advantages = torch.zeros_like(values)
    running = torch.zeros_like(values[:, 0])
    for step in range(values.shape[1] - 1, -1, -1):
        running = deltas[:, step] + gamma * lam * continues[:, step] * running
        advantages[:, step] = running
    return advantages


def normalise(advantages: Tensor, free: Tensor, eps: float = 1e-8) -> Tensor:
    """Return advantages with mean 0 and standard deviation 1 over the steps in ``free``, 0 at other steps.

    ``free [env, step]`` is true where the policy had more than one legal action. Steps with a single legal
    action have no policy gradient, so mean and standard deviation leave them out.
    """
    counted = advantages[free]
    if counted.numel() == 0:
        return torch.zeros_like(advantages)
    return (advantages - counted.mean()) / (counted.std(correction=0) + eps) * free
