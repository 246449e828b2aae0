"""Terms of the PPO objective, pure functions of tensors ``[env, step]``.

Every sum is divided by ``rows``, a number of rows of the whole rollout, so the gradients of shards add up to
the gradient of the batch.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from esper.leyline import Head

HEAD_ENTROPY_WEIGHTS: Final = (1.0, 1.0, 1.5, 1.2, 1.5, 1.2, 1.3, 1.3)
"""Weight of each head in the entropy bonus, in ``Head`` order; larger for heads that few ops read."""
KEPT_OPEN: Final = (Head.BLUEPRINT, Head.TEMPO)
"""Heads with an entropy floor; only GERMINATE reads these heads, so they collapse before exploring."""


class PolicyLoss(NamedTuple):
    """Clipped surrogate loss and the log ratios."""

    loss: Tensor
    log_ratio: Tensor
    """``[env, step]``, log of new over old probability of the whole action."""


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip: float,
    rows: int,
    per_head: bool = False,
) -> PolicyLoss:
    """Return the clipped surrogate loss −Σ min(r·A, clip(r, 1 ± clip)·A) / rows.

    r = exp(Σ_h log p_h − log p_h,old) is the joint ratio over the heads h.

    Args:
        log_probs: ``[env, step, 8]``, 0 for heads that were not read.
        old_log_probs: ``[env, step, 8]``.
        advantages: A ``[env, step]``.
        clip: Clipping range of the ratio.
        rows: Divisor of the sum.
        per_head: Clip the ratio of each head separately and add the surrogates of all heads.
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
    """Return ½ Σ (V − R)² / rows, all tensors ``[env, step]``.

    With ``clip`` the error of a row is the larger of the errors of V and V_old + clip(V − V_old, ± clip).
    """
    error = (values - returns).square()
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - returns).square())
    return 0.5 * error.sum() / rows


def entropy_bonus(entropies: Tensor, has_choice: Tensor, *, rows: int) -> Tensor:
    """Return Σ w_h·H_h / rows over entropies ``[env, step, 8]`` where ``has_choice`` is true."""
    weights = entropies.new_tensor(HEAD_ENTROPY_WEIGHTS)
    return (entropies * has_choice * weights).sum() / rows


def closing_penalty(entropies: Tensor, has_choice: Tensor, *, floor: float, rows: int) -> Tensor:
    """Return Σ max(floor − H_h, 0) / rows over entropies ``[env, step, 8]`` of the heads ``KEPT_OPEN``."""
    heads = list(KEPT_OPEN)
    return ((floor - entropies[..., heads].clamp(min=0)).relu() * has_choice[..., heads]).sum() / rows


def approximate_kl(log_ratio: Tensor) -> Tensor:
    """Return the k3 estimate of KL(old ‖ new) per row: (r − 1) − ln r ≥ 0."""
    return log_ratio.exp() - 1 - log_ratio
