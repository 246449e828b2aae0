"""Numbers that separate healthy from unhealthy, each written once."""

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
"""Consecutive settled epochs after which a host counts as stabilised for the rest of its episode."""

RATIO_RANGE: Final = (0.1, 5.0)
"""New over old probability of a decision; a ratio outside is an explosion and is traced to its row."""
HEAD_ENTROPY_COLLAPSED: Final = 0.1
"""Entropy, 1 for uniform, below which a head that had a choice no longer explores."""
POLICY_GRADIENT_EXPLODING: Final = 100.0
"""Norm of the policy's gradient before clipping."""
DETAIL_ITERATIONS: Final = 3
"""Iterations that are written in full from an alert on, its own included."""
DETAIL_EPOCHS: Final = 5
"""The same in epochs, for an episode that is not part of a training."""

CONFIDENCE_Z: Final = 1.96
"""Standard errors of a two-sided 95 % interval."""

DEFAULT_TARGET_KL: Final = 0.03
"""Divergence per update that passes aim at unless a configuration says otherwise."""
KL_HIGH: Final = 2.0
"""Times its target; passes stop beyond 1.5 times, so one step overshot."""
KL_RUNAWAY: Final = 5.0
"""Times its target; a single step moved the policy far beyond what its rollout says anything about."""
RATIO_EXPLODED: Final = (1e-6, 10.0)
"""Range that the ratio of no decision leaves in a healthy training.

It is wider than what is traced: single decisions reach 5.9 there, and 0.001 where a policy that has made
up its mind drops what it once tried.
"""
CLIP_SHARE: Final = 0.75
"""Share of the rows with a choice; healthy trainings, whose ratio is that of eight heads, reach 0.7."""
VALUE_NRMSE: Final = 1.0
"""Error of a critic that knows the mean return and nothing else; where a healthy one may begin."""
GRADIENT_JUMP: Final = 100.0
"""Times the mean of the earlier updates, for the policy's gradient before clipping."""
HEAD_ENTROPY_OPEN: Final = 0.5
"""Entropy above which a head explores; from here to collapsed takes a healthy head several updates."""
OPENING_UPDATES: Final = 3
"""First updates of a training; a policy has learned when it earns clearly more than the best of these."""
LEARNED_GAIN: Final = 0.01
"""How much more, before reward_scale: what one point of score is worth."""
FORCED_SHARE: Final = 0.6
"""Share of the decisions that are none; what is left is what a policy can learn from."""
WAIT_SHARE: Final = 0.95
"""Share of WAIT among all decisions; beyond, hardly anything is tried."""
SHAPING_SHARE: Final = 0.5
"""Share of shaping in the reward; beyond, a policy earns more for the way than for the goal."""
CORRELATED_EPISODES: Final = 20
"""Episodes over which return and score are compared."""
RANK_CORRELATION: Final = -0.45
"""Lowest rank correlation that 20 unrelated pairs show by chance in all but 2.5 % of the cases."""
SLOWDOWN: Final = 0.7
"""Share of the usual throughput."""
USUAL_ITERATIONS: Final = 5
"""Iterations after which it is known what throughput is usual."""
DISK_FREE_MB: Final = 500.0
"""Room that a run needs to finish what it is writing."""
