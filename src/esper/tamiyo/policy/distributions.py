"""Categorical distribution over the legal values of one head."""

from typing import Final

import torch
from torch import Tensor

from esper.leyline.errors import EsperError

MASKED_LOG_PROB: Final = -1e4
"""Log-probability of masked values: finite for finite gradients, and in the range of half precision."""


class EmptyMaskError(EsperError):
    """A head has no legal value."""


def mask_logits(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Return ``logits [..., k]`` with ``MASKED_LOG_PROB`` where ``mask`` is false."""
    if mask is None:
        return logits
    _check(mask)
    return torch.where(mask, logits, MASKED_LOG_PROB)


def _check(mask: Tensor) -> None:
    if not mask.any(dim=-1).all():
        row = (~mask.any(dim=-1)).nonzero()[0].tolist()
        raise EmptyMaskError(f"row {row} of a mask of shape {tuple(mask.shape)} allows no value")


class MaskedCategorical:
    """Softmax of ``logits [..., k]`` over the values where ``mask [..., k]`` is true, in float32."""

    def __init__(self, logits: Tensor, mask: Tensor) -> None:
        _check(mask)
        self.mask = mask
        # Masked logits are -inf, since a finite value could exceed very low legal logits.
        masked = torch.where(mask, logits.float(), -torch.inf)
        self.log_probs = masked.log_softmax(dim=-1).clamp_min(MASKED_LOG_PROB)

    @property
    def probs(self) -> Tensor:
        return self.log_probs.exp()

    @property
    def mode(self) -> Tensor:
        """Most probable value, ``[...]``."""
        return self.log_probs.argmax(dim=-1)

    def sample(self, uniform: Tensor) -> Tensor:
        """Return one value per row: the smallest k with cdf(k) > u, for u = ``uniform [...]`` in [0, 1).

        The caller passes the random numbers, so that every environment can have its own stream. Masked values
        have probability 0 and are never returned.
        """
        cumulative = self.probs.double().cumsum(dim=-1)
        threshold = uniform.double().unsqueeze(-1) * cumulative[..., -1:]
        return (cumulative <= threshold).sum(dim=-1).clamp_max(self.mask.shape[-1] - 1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability of ``value [...]``; exactly 0 where only one value is legal."""
        chosen = self.log_probs.gather(-1, value.unsqueeze(-1)).squeeze(-1)
        return torch.where(self.has_choice, chosen, torch.zeros_like(chosen))

    @property
    def has_choice(self) -> Tensor:
        """Rows ``[...]`` with more than one legal value."""
        return self.mask.sum(dim=-1) > 1

    def entropy(self) -> Tensor:
        """Return −Σ p ln p / ln n ``[...]`` for n legal values, in [0, 1]; 0 for n = 1."""
        choices = self.mask.sum(dim=-1)
        surprise = torch.where(self.mask, self.probs * self.log_probs, torch.zeros_like(self.log_probs))
        largest = choices.clamp_min(2).float().log()
        normalised = -surprise.sum(dim=-1) / largest
        return torch.where(choices > 1, normalised, torch.zeros_like(normalised))
