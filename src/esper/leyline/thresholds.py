"""Thresholds of gates, trend detection and alerts."""

from typing import Final

GRADIENT_VANISHING: Final = 1e-7
"""Gradient norm of a parameter tensor below which it counts as vanishing."""
GRADIENT_EXPLODING: Final = 10.0
"""Gradient norm of a parameter tensor above which it counts as exploding."""
MIN_GRADIENT_HEALTH: Final = 0.7
"""Gradient health that a seed needs to enter BLENDING (gate G2)."""

PLATEAU_GAIN: Final = 0.5
"""Gain of an epoch, in points of score, below which it counts as part of a plateau."""
STABLE_LOSS_GAIN: Final = (-0.05, 0.03)
"""Open interval of the relative loss gain per epoch in which a host counts as settled."""
STABLE_EPOCHS: Final = 3
"""Consecutive settled epochs after which a host counts as stabilised for the rest of its episode."""

RATIO_RANGE: Final = (0.1, 5.0)
"""Range of new over old probability of a decision; ``RatioExplosionDiagnostic`` reports ratios outside."""
HEAD_ENTROPY_COLLAPSED: Final = 0.1
"""Normalised entropy (1 is uniform) below which a head counts as collapsed."""
POLICY_GRADIENT_EXPLODING: Final = 100.0
"""Norm of the policy's gradient before clipping above which it counts as exploding."""
DETAIL_ITERATIONS: Final = 3
"""Iterations written at full detail after an alert, the one of the alert included."""
DETAIL_EPOCHS: Final = 5
"""Epochs written at full detail after an alert outside of a training."""

CONFIDENCE_Z: Final = 1.96
"""Half-width of a two-sided 95 % confidence interval, in standard errors."""

DEFAULT_TARGET_KL: Final = 0.03
"""Default target of the KL divergence per policy update."""
KL_HIGH: Final = 2.0
"""KL over its target that raises a warning. Update epochs stop beyond 1.5, so a single step overshot."""
KL_RUNAWAY: Final = 5.0
"""KL over its target that raises an error: the rollout no longer describes the policy."""
RATIO_EXPLODED: Final = (1e-6, 10.0)
"""Range of new over old probability in healthy trainings.

It is wider than ``RATIO_RANGE``: in recorded healthy trainings single decisions reach 5.9, and 0.001 when a
policy abandons an action.
"""
CLIP_SHARE: Final = 0.75
"""Largest healthy share of clipped rows; with the joint ratio of eight heads, good trainings reach 0.7."""
VALUE_NRMSE: Final = 1.0
"""Normalised error of a critic that predicts the mean return; healthy critics may start there."""
GRADIENT_JUMP: Final = 100.0
"""Policy gradient norm before clipping, over the mean of earlier updates, that raises an alert."""
HEAD_ENTROPY_OPEN: Final = 0.5
"""Normalised entropy above which a head explores. A healthy head takes several updates from here to
``HEAD_ENTROPY_COLLAPSED``."""
OPENING_UPDATES: Final = 3
"""Number of first updates whose best return is the baseline of ``LEARNED_GAIN``."""
LEARNED_GAIN: Final = 0.01
"""Gain over the baseline return that counts as learning, before reward_scale; 0.01 is one point of score."""
FORCED_SHARE: Final = 0.6
"""Largest healthy share of forced decisions; a policy learns nothing from these."""
WAIT_SHARE: Final = 0.95
"""Largest healthy share of WAIT among all decisions; above, the policy hardly explores."""
SHAPING_SHARE: Final = 0.5
"""Largest healthy share of shaping terms in the reward."""
CORRELATED_EPISODES: Final = 20
"""Number of episodes over which returns and gains are correlated."""
RANK_CORRELATION: Final = -0.45
"""Rank correlation that 20 unrelated pairs fall below by chance in 2.5 % of the cases."""
SLOWDOWN: Final = 0.7
"""Share of the usual throughput below which a run counts as slow."""
USUAL_ITERATIONS: Final = 5
"""Number of first iterations that define the usual throughput."""
DISK_FREE_MB: Final = 500.0
"""Free disk space that a run needs to finish its files."""
