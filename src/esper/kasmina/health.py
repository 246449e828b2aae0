"""Gradient health of a seed, from the gradients of the last minibatch."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from esper.leyline.slot_table import GradientStatistics
from esper.leyline.thresholds import GRADIENT_EXPLODING, GRADIENT_VANISHING


def statistics_from(summary: Sequence[float]) -> GradientStatistics:
    """Return gradient statistics of a seed from its total norm and shares of vanishing and exploding norms.

    health = 1 − 0.5·(share of vanishing gradients) − 0.8·(share of exploding gradients), clamped to [0, 1]; 0
    if the total norm is not finite.
    """
    norm, small, large = summary
    health = 1.0 - 0.5 * small - 0.8 * large if math.isfinite(norm) else 0.0
    return GradientStatistics(norm, min(max(health, 0.0), 1.0), small > 0, large > 0)


def statistics_of(norms: Tensor) -> GradientStatistics:
    """Return statistics of a seed's gradient norms, one per parameter tensor, in one read from the device."""
    return statistics_from(gradient_summary(norms).tolist())


def gradient_summary(norms: Tensor) -> Tensor:
    """Return, on the device of ``norms``, the total norm and the shares of vanishing and exploding norms.

    A norm vanishes below the vanishing bound, and explodes above the exploding bound or if it is not finite.
    """
    finite = norms.isfinite()
    small = finite & (norms < GRADIENT_VANISHING)
    large = ~finite | (norms > GRADIENT_EXPLODING)
    return torch.stack([torch.linalg.vector_norm(norms), small.float().mean(), large.float().mean()])


def tensor_norms(tensors: list[Tensor]) -> Tensor:
    """Return the norm of each gradient, one per parameter tensor."""
    return torch.stack(torch._foreach_norm(tensors))
