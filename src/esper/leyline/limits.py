"""Numbers that separate healthy from unhealthy, each written once."""

from __future__ import annotations

from typing import Final

GRADIENT_VANISHING: Final = 1e-7
"""A parameter tensor whose gradient norm is below this has stopped learning."""
GRADIENT_EXPLODING: Final = 10.0
"""A parameter tensor whose gradient norm is above this is out of control."""
MIN_GRADIENT_HEALTH: Final = 0.7
"""Health that a seed needs before it may touch the host (gate G2)."""

PLATEAU_GAIN: Final = 0.5
"""Points of score per epoch below which an epoch counts towards a plateau."""
STABLE_LOSS_GAIN: Final = (-0.05, 0.03)
"""Relative loss gain per epoch of a host that has settled (open interval)."""
STABLE_EPOCHS: Final = 3
"""Consecutive settled epochs after which a host counts as stabilised for the rest of its life."""

RATIO_RANGE: Final = (0.1, 5.0)
"""New over old probability of a decision; a ratio outside is an explosion and is traced to its row."""
HEAD_ENTROPY_COLLAPSED: Final = 0.01
"""Entropy, 1 for uniform, below which a head that had a choice no longer explores."""
POLICY_GRADIENT_EXPLODING: Final = 100.0
"""Norm of the policy's gradient before clipping."""
DETAIL_ROUNDS: Final = 3
"""Rounds that are written in full from an alert on, its own included."""
DETAIL_EPOCHS: Final = 5
"""The same in epochs, for a life that is not part of a training."""

CONFIDENCE_Z: Final = 1.96
"""Standard errors of a two-sided 95 % interval."""
