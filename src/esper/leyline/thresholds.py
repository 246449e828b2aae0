"""Thresholds of gates, trend detection and alerts."""

from typing import Final

GRADIENT_VANISHING: Final = 1e-7
"""Gradient norm of a parameter tensor below which the gradient counts as vanishing."""
GRADIENT_EXPLODING: Final = 10.0
"""Gradient norm of a parameter tensor above which the gradient counts as exploding."""
MIN_GRADIENT_HEALTH: Final = 0.7
"""Gradient health that a seed needs to enter BLENDING (gate G2)."""

PLATEAU_GAIN: Final = 0.5
"""Score gain in points below which an epoch counts as part of a plateau."""
STABLE_LOSS_GAIN: Final = (-0.05, 0.03)
"""Open interval of the relative loss gain per epoch in which a host counts as settled."""
STABLE_EPOCHS: Final = 3
"""Consecutive settled epochs after which a host counts as stabilised for the rest of its episode."""

RATIO_RANGE: Final = (0.1, 5.0)
"""Range of new over old probability of a decision; ``RatioExplosionDiagnostic`` reports ratios outside."""
HEAD_ENTROPY_COLLAPSED: Final = 0.1
"""Normalised entropy (1 is uniform) below which a head counts as collapsed."""
POLICY_GRADIENT_EXPLODING: Final = 100.0
"""Norm before clipping above which the policy's gradient counts as exploding."""
DETAIL_ITERATIONS: Final = 3
"""Iterations written at full detail after an alert, including the iteration of the alert."""
DETAIL_EPOCHS: Final = 5
"""Epochs written at full detail after an alert in a run without a policy training."""

CONFIDENCE_Z: Final = 1.96
"""Half-width of a two-sided 95 % confidence interval, in standard errors."""

DEFAULT_TARGET_KL: Final = 0.03
"""Default target of the KL divergence per policy update."""
KL_HIGH: Final = 2.0
"""Ratio of KL divergence to its target that raises a warning.

Update epochs stop beyond a ratio of 1.5, so a higher ratio is the effect of a single gradient step.
"""
KL_RUNAWAY: Final = 5.0
"""Ratio of KL divergence to its target that raises an error: the rollout is too far off-policy."""
RATIO_EXPLODED: Final = (1e-6, 10.0)
"""Range of new over old probability of a decision in normal trainings.

The range is wider than ``RATIO_RANGE``: in recorded normal trainings ratios of single decisions reach 5.9,
and 0.001 when a policy abandons an action.
"""
CLIP_SHARE: Final = 0.75
"""Largest normal share of clipped rows; the joint ratio of eight heads reaches 0.7 in good trainings."""
VALUE_NRMSE: Final = 1.0
"""Normalised error of a critic that always predicts the mean return; good critics may start with it."""
GRADIENT_JUMP: Final = 100.0
"""Ratio of policy gradient norm, before clipping, to its mean in earlier updates that raises an alert."""
HEAD_ENTROPY_OPEN: Final = 0.5
"""Normalised entropy above which a head explores.

Entropy of a head normally takes several updates to fall from this value to ``HEAD_ENTROPY_COLLAPSED``.
"""
OPENING_UPDATES: Final = 3
"""Number of first policy updates whose best return is the baseline of ``LEARNED_GAIN``."""
LEARNED_GAIN: Final = 0.01
"""Gain over the baseline return that counts as learning, before reward_scale; 0.01 is one point of score."""
FORCED_SHARE: Final = 0.6
"""Largest normal share of forced decisions; a policy learns nothing from forced decisions."""
WAIT_SHARE: Final = 0.95
"""Largest normal share of WAIT among all decisions; with more WAIT the policy hardly explores."""
SHAPING_SHARE: Final = 0.5
"""Largest normal share of shaping terms in the reward."""
CORRELATED_EPISODES: Final = 20
"""Number of episodes in the rank correlation of returns and gains."""
RANK_CORRELATION: Final = -0.45
"""Rank correlation that 20 unrelated pairs fall below by chance in 2.5 % of the cases."""
SLOWDOWN: Final = 0.7
"""Share of the usual throughput below which a run counts as slow."""
USUAL_ITERATIONS: Final = 5
"""Number of first training iterations whose throughput counts as usual."""
DISK_FREE_MB: Final = 500.0
"""Free disk space that a run needs to finish its files."""
