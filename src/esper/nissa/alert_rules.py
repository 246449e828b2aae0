"""Table of the alert rules: condition, severity, delay and hint.

Every threshold of an alert rule is a constant of ``leyline.thresholds``. ``nissa.alert_monitor`` evaluates
the alert rules; ``tools/make_reference.py`` writes them to ``docs/alerts.md``.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple, get_type_hints

from esper.leyline import Row, Severity
from esper.leyline import thresholds as limits
from esper.nissa import conditions
from esper.nissa.conditions import Condition


class Rule(NamedTuple):
    """Alert rule: raises an alert when a condition holds for rows of one telemetry table."""

    name: str
    severity: Severity
    condition: str
    """Condition of the alert rule in words, with its numerical limits."""
    evaluate: Condition
    hint: str
    times: int = 1
    """Number of consecutive violations of the limit that raise the alert; one value within the limit clears
    the alert.
    """
    window: int = 1
    """Number of rows from which the alert rule computes one value."""
    of_the_machine: bool = False
    """Whether the alert rule depends on the machine, so that two runs with equal settings may differ in
    alerts.
    """

    @property
    def table(self) -> type[Row]:
        """Type of the telemetry rows that the alert rule reads."""
        row: type[Row] = get_type_hints(self.evaluate)["row"]
        return row

    @property
    def delay(self) -> int:
        """Largest number of rows from the first violation of the limit to the alert."""
        return max(self.times, self.window)


_NOT_LEARNED: Final = (
    f"the policy has not learned: its last {limits.OPENING_UPDATES} updates earned no more than the best of"
    f" the first {limits.OPENING_UPDATES} and one point of score"
)

RULES: Final = (
    Rule(
        "non-finite-update",
        "error",
        "a loss, the entropy or the divergence is not finite, or the update was left out",
        conditions.not_finite,
        "Read `skipped` of the update for the first number that broke; lower learning_rate or reward_scale.",
    ),
    Rule(
        "ratio",
        "error",
        "a decision's probability changed by a factor outside {:g} to {:g}".format(*limits.RATIO_EXPLODED),
        conditions.ratio_exploded,
        "`explosion` of the update names the decision and its head; lower learning_rate, and go back to a"
        " checkpoint if the return fell.",
    ),
    Rule(
        "kl",
        "warning",
        f"the divergence is above {limits.KL_HIGH:g} times target_kl",
        conditions.update_above("approx_kl", limits.KL_HIGH, "target_kl"),
        "Single steps overshoot the target, so the early stop comes too late; lower learning_rate.",
        times=2,
    ),
    Rule(
        "kl-runaway",
        "error",
        f"the divergence is above {limits.KL_RUNAWAY:g} times target_kl",
        conditions.update_above("approx_kl", limits.KL_RUNAWAY, "target_kl"),
        "One step moved the policy far from its rollout; lower learning_rate and go back to a checkpoint.",
    ),
    Rule(
        "clip-share",
        "warning",
        f"the ratio is clipped in more than {limits.CLIP_SHARE:.0%} of the rows that had a choice",
        conditions.update_above("clip_fraction", limits.CLIP_SHARE),
        "Most rows no longer contribute a gradient; lower learning_rate or update_epochs.",
        times=2,
    ),
    Rule(
        "head-collapse",
        "warning",
        f"a head's entropy is below {limits.HEAD_ENTROPY_COLLAPSED:.0%} of what was legal, and either fell"
        f" there at once from above {limits.HEAD_ENTROPY_OPEN:.0%}, or {_NOT_LEARNED}",
        conditions.heads_collapsed,
        "A head that stops exploring before anything was gained cannot find it any more; raise"
        " entropy_start or lower learning_rate. A head that settles while the return rises is healthy and"
        " raises nothing.",
        times=3,
    ),
    Rule(
        "value-error",
        "warning",
        f"the critic's error is above {limits.VALUE_NRMSE:g} spread of the returns",
        conditions.update_above("value_nrmse", limits.VALUE_NRMSE),
        "The critic is worse than a constant, so advantages are noise; check reward_scale and gamma, or"
        " raise value_coefficient.",
        times=10,
    ),
    Rule(
        "gradient-jump",
        "error",
        f"the gradient before clipping is above {limits.GRADIENT_JUMP:g} times the mean of earlier updates",
        conditions.gradient_jump,
        "Look for an outlier among the iteration's rewards; lower reward_scale or learning_rate.",
    ),
    Rule(
        "forced-share",
        "warning",
        f"more than {limits.FORCED_SHARE:.0%} of the decisions had no choice, and {_NOT_LEARNED}",
        conditions.forced,
        "Little is left to learn from; give an episode more slots or fewer steps.",
        times=3,
    ),
    Rule(
        "idle",
        "warning",
        f"more than {limits.WAIT_SHARE:.0%} of the decisions are WAIT",
        conditions.waits,
        "The policy does nothing: growth does not pay here, or costs too much at first; lower rent or raise"
        " entropy_start.",
        times=5,
    ),
    Rule(
        "slow",
        "warning",
        f"throughput of the rollout is below {limits.SLOWDOWN:.0%} of the median of all earlier iterations,"
        f" known after {limits.USUAL_ITERATIONS}",
        conditions.slow,
        "Look for another process on this machine, or for memory that swaps.",
        times=5,
        of_the_machine=True,
    ),
    Rule(
        "pays-for-worse",
        "error",
        f"the rank correlation of return and final score (lead over the twin where it is known) is below"
        f" {limits.RANK_CORRELATION:g}",
        conditions.pays_for_worse,
        "Worse networks are rewarded more: a sign of the reward is flipped, or a cost outweighs the score;"
        " stop and check the reward terms.",
        window=limits.CORRELATED_EPISODES,
    ),
    Rule(
        "shaping",
        "warning",
        f"shaping terms, which do not reward the result, make up more than {limits.SHAPING_SHARE:.0%} of"
        " the absolute reward",
        conditions.shaping,
        "The policy optimises the shaping terms; lower them.",
        window=limits.CORRELATED_EPISODES,
    ),
    Rule(
        "dead-seed",
        "warning",
        f"a seed that trains, blends or holds has a gradient health below {limits.MIN_GRADIENT_HEALTH:g}",
        conditions.dead,
        "Its gradients vanish or explode, so it does not learn; prune it, and try another blueprint there.",
        times=2,
    ),
    Rule(
        "harmful-seed",
        "warning",
        "outside of trainings, the contribution of a seed that holds, or blends at constant alpha, is more"
        f" than {limits.CONFIDENCE_Z:g} standard errors below 0",
        conditions.harmful,
        "The network is better without it; prune it before it is fossilized.",
        times=2,
    ),
    Rule(
        "disk-nearly-full",
        "error",
        f"less than {limits.DISK_FREE_MB:g} MB are free where the run is written",
        conditions.disk_full,
        "Make room: on a full disk a run continues without rows and checkpoints, and ends with an error.",
        of_the_machine=True,
    ),
)
MACHINE_RULES: Final = frozenset(rule.name for rule in RULES if rule.of_the_machine)

GOVERNOR_RULES: Final[Mapping[str, str]] = {
    "non-finite": "a host's loss, or a seed, is not finite",
    "collapse": "a host that had learned scores no better than chance, two epochs in a row",
    "divergence": "a host's loss rose far above its usual fluctuation, two epochs in a row",
}
"""Alerts that come from no alert rule, with their causes: the governor of a host's training raises them when
it rolls back or prunes.
"""
