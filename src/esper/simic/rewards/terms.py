"""Reward terms as pure functions of arrays ``[env]``; scores are in points, parameters are counts."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

PARAMETERS_PER_RENT: Final = 1000.0


def paired_potential(score: Array, twin_score: Array) -> Array:
    """What growth has won so far: the lead over the do-nothing twin, 1 for 100 points."""
    return (score - twin_score) / 100.0


def rent_potential(grown_params: Array, rent: float) -> Array:
    """What the grown parameters cost: ``rent`` per thousand, never positive."""
    return -rent * grown_params / PARAMETERS_PER_RENT
