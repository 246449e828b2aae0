"""Objectives of tasks: the loss that training minimises, and the score by which networks are compared."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

Measure = Callable[[Tensor, Tensor], Tensor]
"""Function of ``output`` and ``target`` that returns a loss or score, as a mean or for each sample."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Loss and score of one kind of task, such as classification."""

    loss: Measure
    """Function that returns the mean loss of a batch."""
    sample_losses: Measure
    """Function that returns the loss of every sample, ``[sample]``."""
    sample_scores: Measure
    """Function that returns the score of every sample, ``[sample]``, from 0 to 100; higher is better."""


def _sample_losses(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


def _sample_scores(output: Tensor, target: Tensor) -> Tensor:
    return 100.0 * (output.argmax(dim=-1) == target).float()


CLASSIFICATION = Objective(F.cross_entropy, _sample_losses, _sample_scores)
"""Objective of classification: cross entropy as loss, and a score of 100 for the right class, else 0."""


def regression(targets: Tensor) -> Objective:
    """Return the objective of regression, with the squared error as loss.

    The score of a sample is 100·(1 − squared error / variance of ``targets``), at least 0.
    """
    variance = (targets - targets.mean(dim=0)).square().mean()

    def losses(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().flatten(1).mean(dim=1)

    def scores(output: Tensor, target: Tensor) -> Tensor:
        return 100.0 * (1.0 - losses(output, target) / variance).clamp(min=0.0)

    return Objective(F.mse_loss, losses, scores)


def _by_token(measure: Measure) -> Measure:
    """Return a function that computes ``measure`` for every token, and its mean for each sample."""

    def of_samples(output: Tensor, target: Tensor) -> Tensor:
        return measure(output.flatten(0, 1), target.flatten()).view(target.shape).mean(dim=1)

    return of_samples


def _token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


NEXT_TOKEN = Objective(_token_loss, _by_token(_sample_losses), _by_token(_sample_scores))
"""Objective of text: cross entropy of the next token as loss, and the percentage of right tokens as score."""
