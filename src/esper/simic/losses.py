"""The terms of the PPO objective, pure functions of tensors ``[env, step]``.

Every sum is divided by ``rows``, a number of rows of the whole rollout, so that the gradients of
shards add up to the gradient of the batch.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from esper.leyline import Head

HEAD_ENTROPY_WEIGHTS: Final = (1.0, 1.0, 1.5, 1.2, 1.5, 1.2, 1.3, 1.3)
"""Per head, in ``Head`` order: heads that are read rarely need more push to stay open."""
KEPT_OPEN: Final = (Head.BLUEPRINT, Head.TEMPO)
"""Heads that decide what grows and how, and are read only where a seed germinates."""


class PolicyLoss(NamedTuple):
    """The clipped surrogate and what it was made of."""

    loss: Tensor
    log_ratio: Tensor
    """``[env, step]``, of new over old probability of the whole action."""


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip: float,
    rows: int,
    per_head: bool = False,
) -> PolicyLoss:
    """PPO's clipped surrogate −min(r·A, clip(r, 1 ± clip)·A); r is the joint ratio of the heads read.

    ``log_probs [env, step, 8]`` are 0 for heads that were not read. With ``per_head`` every head is
    clipped by itself and the surrogates are added.
    """
    difference = log_probs - old_log_probs
    log_ratio = difference.sum(dim=-1)
    if per_head:
        read = (old_log_probs != 0) | (log_probs != 0)
        gain = _surrogate(difference.exp(), advantages.unsqueeze(-1), clip) * read
    else:
        gain = _surrogate(log_ratio.exp(), advantages, clip)
    return PolicyLoss(-gain.sum() / rows, log_ratio)


def _surrogate(ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None, rows: int
) -> Tensor:
    """Half the squared error; with ``clip`` the worse of it and that of the clipped prediction."""
    error = (values - returns).square()
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - returns).square())
    return 0.5 * error.sum() / rows


def entropy_bonus(entropies: Tensor, has_choice: Tensor, *, rows: int) -> Tensor:
    """Weighted entropies ``[env, step, 8]`` of the heads that had a choice."""
    weights = entropies.new_tensor(HEAD_ENTROPY_WEIGHTS)
    return (entropies * has_choice * weights).sum() / rows


def closing_penalty(entropies: Tensor, has_choice: Tensor, *, floor: float, rows: int) -> Tensor:
    """How far the entropies ``[env, step, 8]`` of the heads to keep open lie below ``floor``."""
    heads = list(KEPT_OPEN)
    return ((floor - entropies[..., heads].clamp(min=0)).relu() * has_choice[..., heads]).sum() / rows


def approximate_kl(log_ratio: Tensor) -> Tensor:
    """The k3 estimate of KL(old ‖ new) per row: (r − 1) − ln r, never negative."""
    return log_ratio.exp() - 1 - log_ratio
