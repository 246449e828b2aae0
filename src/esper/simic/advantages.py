"""Advantage estimation, pure functions of tensors ``[env, step]``."""

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
    """Return generalised advantage estimates (GAE, Schulman et al. 2016), all tensors ``[env, step]``.

    d_t = r_t + gamma · (1 − terminated_t) · v'_t − v_t
    A_t = d_t + gamma · lam · (1 − ended_t) · A_{t+1},  A_T = 0

    ``next_values`` v'_t is the value of the state that step t reached, before any reset. A truncated episode
    bootstraps from this value, a terminated episode does not; ``ended`` is true at the end of either.
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
    """Return (A − mean) / (std + eps) over the rows where ``free [env, step]`` is true, 0 elsewhere.

    ``free`` marks rows with a choice. Rows without a choice have no policy gradient and must not scale it.
    """
    counted = advantages[free]
    if counted.numel() == 0:
        return torch.zeros_like(advantages)
    return (advantages - counted.mean()) / (counted.std(correction=0) + eps) * free
