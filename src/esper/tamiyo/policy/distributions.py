"""Categorical distribution over the legal values of one head."""

from typing import Final

import torch
from torch import Tensor

from esper.leyline.errors import EsperError

MASKED_LOG_PROB: Final = -1e4
"""Log-probability of masked values: finite, so that gradients are finite, and in the range of float16."""


class EmptyMaskError(EsperError):
    """Error: a head of an action has no legal value."""


def mask_logits(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Return ``logits [..., value]`` with ``MASKED_LOG_PROB`` where ``mask`` is false."""
    if mask is None:
        return logits
    _check(mask)
    return torch.where(mask, logits, MASKED_LOG_PROB)


def _check(mask: Tensor) -> None:
    if not mask.any(dim=-1).all():
        row = (~mask.any(dim=-1)).nonzero()[0].tolist()
        raise EmptyMaskError(f"row {row} of a mask of shape {tuple(mask.shape)} allows no value")


class MaskedCategorical:
    """Softmax of ``logits [..., value]`` over the values where ``mask [..., value]`` is true, in float32.

    Args:
        logits: Unnormalised log-probabilities.
        mask: Legal values.
        validate: Raise ``EmptyMaskError`` if a mask allows no value, which waits for the device of ``mask``.
    """

    def __init__(self, logits: Tensor, mask: Tensor, *, validate: bool = True) -> None:
        if validate:
            _check(mask)
        self.mask = mask
        # Masked logits are set to -inf, since a finite number could exceed very low legal logits.
        masked = torch.where(mask, logits.float(), -torch.inf)
        self.log_probs = masked.log_softmax(dim=-1).clamp_min(MASKED_LOG_PROB)

    @property
    def probs(self) -> Tensor:
        return self.log_probs.exp()

    @property
    def mode(self) -> Tensor:
        """Most probable value of each distribution in the batch."""
        return self.log_probs.argmax(dim=-1)

    def sample(self, uniform: Tensor) -> Tensor:
        """Return one sample per distribution: the smallest value k with cdf(k) > u, for u in [0, 1) from
        ``uniform``.

        The caller passes the random numbers, so that every environment can have its own stream. Masked values
        have probability 0 and are never returned.
        """
        cumulative = self.probs.double().cumsum(dim=-1)
        threshold = uniform.double().unsqueeze(-1) * cumulative[..., -1:]
        return (cumulative <= threshold).sum(dim=-1).clamp_max(self.mask.shape[-1] - 1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability of ``value``; exactly 0 where only one value is legal."""
        chosen = self.log_probs.gather(-1, value.unsqueeze(-1)).squeeze(-1)
        return torch.where(self.has_choice, chosen, torch.zeros_like(chosen))

    @property
    def has_choice(self) -> Tensor:
        """Whether each distribution in the batch has more than one legal value."""
        return self.mask.sum(dim=-1) > 1

    def entropy(self) -> Tensor:
        """Return the normalised entropy −Σ p ln p / ln n, in [0, 1], for n legal values; 0 for n = 1."""
        choices = self.mask.sum(dim=-1)
        surprise = torch.where(self.mask, self.probs * self.log_probs, torch.zeros_like(self.log_probs))
        largest = choices.clamp_min(2).float().log()
        normalised = -surprise.sum(dim=-1) / largest
        return torch.where(choices > 1, normalised, torch.zeros_like(normalised))
