"""A categorical distribution over the legal values of one head."""

from typing import Final

import torch
from torch import Tensor

from esper.leyline.errors import EsperError

MASKED_LOG_PROB: Final = -1e4
"""Stands for minus infinity: finite, so that gradients are, and small enough for half precision."""


class AllMaskedError(EsperError):
    """A row of a mask that allows nothing."""


def mask_logits(logits: Tensor, mask: Tensor | None) -> Tensor:
    """``logits [..., k]`` with ``MASKED_LOG_PROB`` where ``mask`` forbids a value."""
    if mask is None:
        return logits
    _check(mask)
    return torch.where(mask, logits, MASKED_LOG_PROB)


def _check(mask: Tensor) -> None:
    if not mask.any(dim=-1).all():
        row = (~mask.any(dim=-1)).nonzero()[0].tolist()
        raise AllMaskedError(f"row {row} of a mask of shape {tuple(mask.shape)} allows no value")


class MaskedCategorical:
    """Probabilities over the values that ``mask [..., k]`` allows, from ``logits [..., k]``, in float32."""

    def __init__(self, logits: Tensor, mask: Tensor) -> None:
        _check(mask)
        self.mask = mask
        # A finite stand-in before the softmax would win against logits that lie even lower.
        masked = torch.where(mask, logits.float(), -torch.inf)
        self.log_probs = masked.log_softmax(dim=-1).clamp_min(MASKED_LOG_PROB)

    @property
    def probs(self) -> Tensor:
        return self.log_probs.exp()

    @property
    def mode(self) -> Tensor:
        """The likeliest value, ``[...]``."""
        return self.log_probs.argmax(dim=-1)

    def sample(self, uniform: Tensor) -> Tensor:
        """One value per row by inverting the distribution at ``uniform [...]`` in [0, 1).

        The numbers come from outside, so that every environment can draw from its own stream.
        A masked value adds nothing to the cumulative sum and is never met.
        """
        cumulative = self.probs.double().cumsum(dim=-1)
        threshold = uniform.double().unsqueeze(-1) * cumulative[..., -1:]
        return (cumulative <= threshold).sum(dim=-1).clamp_max(self.mask.shape[-1] - 1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of ``value [...]``; exactly 0 where there was one choice only."""
        chosen = self.log_probs.gather(-1, value.unsqueeze(-1)).squeeze(-1)
        return torch.where(self.has_choice, chosen, torch.zeros_like(chosen))

    @property
    def has_choice(self) -> Tensor:
        """``[...]``: more than one value was legal."""
        return self.mask.sum(dim=-1) > 1

    def entropy(self) -> Tensor:
        """Entropy over its largest possible value for this mask, in [0, 1]; 0 without a choice."""
        choices = self.mask.sum(dim=-1)
        surprise = torch.where(self.mask, self.probs * self.log_probs, torch.zeros_like(self.log_probs))
        largest = choices.clamp_min(2).float().log()
        normalised = -surprise.sum(dim=-1) / largest
        return torch.where(choices > 1, normalised, torch.zeros_like(normalised))
