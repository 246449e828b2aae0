"""Terms of the PPO objective: pure functions of tensors with the axes ``[env, step]``.

Every sum over the steps of a shard is divided by ``rows``, a count of steps in the whole rollout, so that
the gradients of all shards add up to the gradient of the whole rollout.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from esper.leyline import Head

HEAD_ENTROPY_WEIGHTS: Final = (1.0, 1.0, 1.5, 1.2, 1.5, 1.2, 1.3, 1.3)
"""Weight of each head in the entropy bonus, in ``Head`` order; larger for heads that few ops read."""
KEPT_OPEN: Final = (Head.BLUEPRINT, Head.TEMPO)
"""Heads with an entropy floor: only GERMINATE reads blueprint and tempo, so their entropy collapses early."""


class PolicyLoss(NamedTuple):
    """Clipped surrogate loss of PPO, and the log ratios of new to old action probabilities."""

    loss: Tensor
    log_ratio: Tensor
    """Log of new over old probability of the whole action, ``[env, step]``."""


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

    The ratio r = exp(Σ_h (log p_h − log p_h,old)) is the joint probability ratio of all heads h.

    Args:
        log_probs: New log-probabilities ``[env, step, head]``, 0 for heads that the op does not read.
        old_log_probs: Log-probabilities ``[env, step, head]`` at the time of the rollout.
        advantages: Normalised advantages A ``[env, step]``.
        clip: Largest distance of the clipped probability ratio from 1.
        rows: Number of steps by which the sum over steps is divided.
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
    """Return the value loss ½ Σ (V − R)² / rows of predicted values V and returns R, each ``[env, step]``.

    With ``clip``, the squared error of a step is that of V or of V_old + clip(V − V_old, ± clip), whichever
    is larger.
    """
    error = (values - returns).square()
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - returns).square())
    return 0.5 * error.sum() / rows


def entropy_bonus(entropies: Tensor, has_choice: Tensor, *, rows: int) -> Tensor:
    """Return the entropy bonus Σ weight · entropy / rows, a sum over steps and heads. Heads with a single
    legal value are left out."""
    weights = entropies.new_tensor(HEAD_ENTROPY_WEIGHTS)
    return (entropies * has_choice * weights).sum() / rows


def closing_penalty(entropies: Tensor, has_choice: Tensor, *, floor: float, rows: int) -> Tensor:
    """Return the entropy penalty Σ max(floor − entropy, 0) / rows, a sum over steps and over the blueprint
    and tempo heads.

    Heads with a single legal value are left out.
    """
    heads = list(KEPT_OPEN)
    return ((floor - entropies[..., heads].clamp(min=0)).relu() * has_choice[..., heads]).sum() / rows


def approximate_kl(log_ratio: Tensor) -> Tensor:
    """Return the k3 estimate (r − 1) − ln r of KL(old ‖ new) for every step, with probability ratios r."""
    return log_ratio.exp() - 1 - log_ratio
