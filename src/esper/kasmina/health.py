"""Gradient health of a seed, from the gradients of its last minibatch."""

from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline.thresholds import GRADIENT_EXPLODING, GRADIENT_VANISHING


class GradientStatistics(NamedTuple):
    """Statistics of a seed's gradients; ``health`` is 1 if no tensor vanishes or explodes."""

    norm: float
    health: float
    vanishing: bool
    exploding: bool


def statistics_of(norms: Tensor) -> GradientStatistics:
    """Return statistics of the gradient norms ``[tensor]`` of a seed; the call reads the norms from their
    device.

    health = 1 − 0.5·(share of tensors below the vanishing bound) − 0.8·(share above the exploding bound or
    non-finite), clamped to [0, 1]; 0 if the total norm is not finite.
    """
    norms = norms.cpu()
    finite = torch.isfinite(norms)
    small = finite & (norms < GRADIENT_VANISHING)
    large = ~finite | (norms > GRADIENT_EXPLODING)
    total = torch.linalg.vector_norm(norms)
    health = 1.0 - 0.5 * small.float().mean().item() - 0.8 * large.float().mean().item()
    if not torch.isfinite(total):
        health = 0.0
    return GradientStatistics(
        norm=total.item(),
        health=min(max(health, 0.0), 1.0),
        vanishing=bool(small.any()),
        exploding=bool(large.any()),
    )


def tensor_norms(tensors: list[Tensor]) -> Tensor:
    """Return the norm of each gradient tensor, ``[tensor]``."""
    return torch.stack(torch._foreach_norm(tensors))
