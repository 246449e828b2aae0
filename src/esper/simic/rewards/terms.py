"""Reward terms as pure functions of arrays; scores are in points, parameters are counts.

Most are potentials: what a state is worth, 1 for 100 points. A reward is their change.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

PARAMETERS_PER_RENT: Final = 1000.0
CHURN_COST: Final = 0.01
"""Of removing a seed: what one point of score is worth."""
ROLLBACK_PENALTY: Final = 0.2
"""Of an episode that broke down, besides all that it had gained: what twenty points of score are worth."""


def paired_potential(score: Array, twin_score: Array) -> Array:
    """What growth has gained so far: the lead over the do-nothing twin."""
    return (score - twin_score) / 100.0


def contribution_potential(contribution: Array, counts: Flags) -> Array:
    """Sum over the slots that count of what was measured there, ``[env, slot]`` to ``[env]``.

    What was never measured (NaN) does not count yet.
    """
    measured = counts & ~np.isnan(contribution)
    return np.where(measured, contribution, 0.0).sum(axis=1) / 100.0


def loss_potential(loss: Array, guess_loss: Array | float) -> Array:
    """Falls with the loss, by 1 from a blind guess to none: improvement is positive."""
    return -loss / guess_loss


def final_potential(score: Array, ended: Flags) -> Array:
    """The score of a finished episode; an episode in progress is worth nothing yet."""
    return np.where(ended, score / 100.0, 0.0)


def rent_potential(grown_params: Array | float, rent: Array | float) -> Array:
    """What the grown parameters cost: ``rent`` per thousand, never positive."""
    return -np.asarray(rent) * grown_params / PARAMETERS_PER_RENT


def churn(pruned: Flags) -> Array:
    """What a removal costs in the step that orders it."""
    return np.where(pruned, -CHURN_COST, 0.0)


def rollback(rolled_back: Flags) -> Array:
    """What a breakdown costs in the step that caused it."""
    return np.where(rolled_back, -ROLLBACK_PENALTY, 0.0)
