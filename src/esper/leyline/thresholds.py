"""Thresholds of gates, of trend detection and of alerts."""

from typing import Final

GRADIENT_VANISHING: Final = 1e-7
"""Gradient norm of a parameter tensor below which the gradient counts as vanishing."""
GRADIENT_EXPLODING: Final = 10.0
"""Gradient norm of a parameter tensor above which the gradient counts as exploding."""
MIN_GRADIENT_HEALTH: Final = 0.7
"""Smallest gradient health with which a seed may enter BLENDING (gate G2)."""

PLATEAU_GAIN: Final = 0.5
"""Gain of the score in points below which an epoch counts as part of a plateau."""
STABLE_LOSS_GAIN: Final = (-0.05, 0.03)
"""Lower and upper bound, both exclusive, of the relative decrease of a host's loss in a settled epoch (one in
which the loss hardly changes).
"""
STABLE_EPOCHS: Final = 3
"""Number of consecutive settled epochs (in which the loss hardly changes) after which a host counts as
stabilised for the rest of its episode."""

RATIO_RANGE: Final = (0.1, 5.0)
"""Range of the ratio of new to old probability of a decision; ``RatioExplosionDiagnostic`` reports ratios
outside this range."""
HEAD_ENTROPY_COLLAPSED: Final = 0.1
"""Normalised entropy (1 is uniform) below which an action head counts as collapsed."""
POLICY_GRADIENT_EXPLODING: Final = 100.0
"""Norm of the policy's gradient, before clipping, above which the gradient counts as exploding."""
DETAIL_ITERATIONS: Final = 3
"""Number of iterations written at full detail after an alert, including the iteration of the alert."""
DETAIL_EPOCHS: Final = 5
"""Number of epochs written at full detail after an alert, in a run that does not train a policy."""

CONFIDENCE_Z: Final = 1.96
"""Half-width of a two-sided 95 % confidence interval, in standard errors."""

DEFAULT_TARGET_KL: Final = 0.03
"""Default target of the KL divergence between the policies before and after an update."""
KL_HIGH: Final = 2.0
"""A warning is raised if the KL divergence is more than this number times its target.

An update stops early at 1.5 times the target KL divergence, so a ratio above 2 is the effect of a single
gradient step.
"""
KL_RUNAWAY: Final = 5.0
"""An alert of severity "error" is raised if the KL divergence is more than this number times its target: the
rollout is then too far off-policy.
"""
RATIO_EXPLODED: Final = (1e-6, 10.0)
"""Range of the ratio of new to old probability of a decision in normal trainings.

The range is wider than ``RATIO_RANGE``: in recorded normal trainings probability ratios of single decisions
reach 5.9, and 0.001 when a policy abandons an action.
"""
CLIP_SHARE: Final = 0.75
"""Largest normal share of decisions whose probability ratio is clipped; with eight heads it reaches 0.7 in
good trainings."""
VALUE_NRMSE: Final = 1.0
"""Largest normal RMS error of a critic's values, in standard deviations of the returns: the error of a critic
that always predicts the mean return. Good critics may have this error, 1.0, at the start of a training.
"""
GRADIENT_JUMP: Final = 100.0
"""An alert is raised if the policy's gradient norm, before clipping, is more than this number times its mean
over earlier updates.
"""
HEAD_ENTROPY_OPEN: Final = 0.5
"""Normalised entropy above which an action head counts as exploring.

The entropy of an action head normally takes several updates to fall from ``HEAD_ENTROPY_OPEN`` to
``HEAD_ENTROPY_COLLAPSED``.
"""
OPENING_UPDATES: Final = 3
"""Number of policy updates at the start of a training; their best return is the baseline of
``LEARNED_GAIN``."""
LEARNED_GAIN: Final = 0.01
"""Smallest gain of the return over the baseline that counts as learning, before the return is scaled by
``reward_scale``; 0.01 is one point of score."""
FORCED_SHARE: Final = 0.6
"""Largest normal share of forced decisions, which have a single legal action and teach a policy nothing."""
WAIT_SHARE: Final = 0.95
"""Largest normal share of op WAIT among all decisions; above it the policy hardly explores."""
SHAPING_SHARE: Final = 0.5
"""Largest normal share of shaping terms in the reward."""
CORRELATED_EPISODES: Final = 20
"""Number of episodes in the rank correlation between returns and score gains by growth."""
RANK_CORRELATION: Final = -0.45
"""Rank correlation below which an alert is raised; by chance, 20 unrelated pairs fall below it with a
probability of 2.5 %."""
SLOWDOWN: Final = 0.7
"""Fraction of the usual throughput below which a run counts as slow."""
USUAL_ITERATIONS: Final = 5
"""Number of training iterations after which the usual throughput of a run is known."""
DISK_FREE_MB: Final = 500.0
"""Free disk space in MB that a run needs to finish its files."""
