"""Alert rules: condition, severity, delay and hint.

The condition of an alert rule is a function from a telemetry row and earlier rows to readings. An unknown
value yields no reading, so it neither raises nor clears an alert.

Every threshold of an alert rule is a constant of ``leyline.thresholds``. ``nissa.alert_monitor`` evaluates
the alert rules; ``tools/make_reference.py`` writes them to ``docs/alerts.md``.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, get_type_hints

from esper.leyline import OP_WAIT, EpisodeRow, ResourceRow, Row, RunRow, SeedRow, Severity, Stage, UpdateRow
from esper.leyline import thresholds as limits
from esper.leyline.rank_correlation import Rewarded, reward_correlation
from esper.nissa.readings import RUN, Reading, RowHistory, above, below

RESULT_TERMS: Final = frozenset({"lead", "score", "loss", "log_loss", "contribution", "rent", "rollback"})
"""Names of the reward terms for the quality of the network, its cost or a breakdown; all other reward terms
are shaping.
"""
NEVER_UNKNOWN: Final = ("policy_loss", "value_loss", "entropy", "approx_kl")
"""Columns of a PPO update row that are None only if the value was not finite."""
LEARNING_STAGES: Final = frozenset({Stage.TRAINING, Stage.BLENDING, Stage.HOLDING})
"""Stages in which a seed learns and can still be pruned: TRAINING, BLENDING and HOLDING."""
Condition = Callable[[Any, RowHistory], Iterator[Reading]]
"""Condition of an alert rule: a function from a row and the earlier rows of the run to readings."""


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
RULES: Final[list[Rule]] = []


def _rule(severity: Severity, condition: str, hint: str, **settings: Any) -> Callable[[Condition], Condition]:
    """Return a decorator that adds an alert rule, named like the decorated condition, to ``RULES``."""

    def add(evaluate: Condition) -> Condition:
        name = evaluate.__name__.replace("_", "-")
        RULES.append(Rule(name, severity, condition, evaluate, hint, **settings))
        return evaluate

    return add


# --- updates ----------------------------------------------------------------------------------------


@_rule(
    "error",
    "a loss, the entropy or the divergence is not finite, or the update was left out",
    "Read `skipped` of the update for the first number that broke; lower learning_rate or reward_scale.",
)
def non_finite_update(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
    wrong = row.skipped is not None or any(getattr(row, name) is None for name in NEVER_UNKNOWN)
    yield Reading(RUN, wrong, None, None)


@_rule(
    "error",
    "a decision's probability changed by a factor outside {:g} to {:g}".format(*limits.RATIO_EXPLODED),
    "`explosion` of the update names the decision and its head; lower learning_rate, and go back to a"
    " checkpoint if the return fell.",
)
def ratio(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
    """Check the PPO ratios: the largest and the smallest ratio of the last update epoch, and the ratio in
    ``explosion``, which is from the first update epoch with an extreme ratio.
    """
    low, high = limits.RATIO_EXPLODED
    ratios = [row.ratio_max, row.ratio_min] if row.skipped is None else []
    if row.explosion is not None:
        ratios.append(row.explosion["ratio"])
    for found in ratios:
        if found is None or not low <= found <= high:  # A PPO ratio that overflowed is None.
            yield Reading(RUN, True, found, low if found is not None and found < low else high)
            return
    if ratios:
        yield Reading(RUN, False, row.ratio_max, high)


@_rule(
    "warning",
    f"the divergence is above {limits.KL_HIGH:g} times target_kl",
    "Single steps overshoot the target, so the early stop comes too late; lower learning_rate.",
    times=2,
)
def kl(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
    yield from _divergence(row, past, limits.KL_HIGH)


@_rule(
    "error",
    f"the divergence is above {limits.KL_RUNAWAY:g} times target_kl",
    "One step moved the policy far from its rollout; lower learning_rate and go back to a checkpoint.",
)
def kl_runaway(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
    yield from _divergence(row, past, limits.KL_RUNAWAY)


def _divergence(row: UpdateRow, past: RowHistory, times_target: float) -> Iterator[Reading]:
    target = past.run.config.get("target_kl")
    if target is not None:
        yield from _above(row, "approx_kl", times_target * target)


@_rule(
    "warning",
    f"the ratio is clipped in more than {limits.CLIP_SHARE:.0%} of the rows that had a choice",
    "Most rows no longer contribute a gradient; lower learning_rate or update_epochs.",
    times=2,
)
def clip_share(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
    yield from _above(row, "clip_fraction", limits.CLIP_SHARE)


def _above(row: UpdateRow, column: str, limit: float) -> Iterator[Reading]:
    """Check a column of an update that was not skipped; a violation is a value above ``limit``."""
    value = getattr(row, column)
    if row.skipped is None and value is not None:
        yield above(RUN, value, limit)


@_rule(
    "warning",
    f"a head's entropy is below {limits.HEAD_ENTROPY_COLLAPSED:.0%} of what was legal, and either fell"
    f" there at once from above {limits.HEAD_ENTROPY_OPEN:.0%}, or {_NOT_LEARNED}",
    "A head that stops exploring before anything was gained cannot find it any more; raise"
    " entropy_start or lower learning_rate. A head that settles while the return rises is healthy and"
    " raises nothing.",
    times=3,
)
def head_collapse(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
    """Check the entropy of each policy head; low entropy is a violation only if it fell abruptly or before
    the policy has learned.
    """
    learned = past.has_learned(row)
    for head, (name, entropy) in enumerate(zip(past.run.heads, row.head_entropy, strict=False)):
        if entropy is not None:
            is_early = not learned or _was_open(head, past.updates)
            yield below(f"head {name}", entropy, limits.HEAD_ENTROPY_COLLAPSED, is_early)


def _was_open(head: int, updates: Sequence[UpdateRow]) -> bool:
    """Return whether the head's entropy collapsed abruptly: its last value before the collapse was above
    ``HEAD_ENTROPY_OPEN``.
    """
    for row in reversed(updates):
        entropy = row.head_entropy[head]
        if entropy is not None and entropy >= limits.HEAD_ENTROPY_COLLAPSED:
            return entropy > limits.HEAD_ENTROPY_OPEN
    return False


@_rule(
    "warning",
    f"the critic's error is above {limits.VALUE_NRMSE:g} spread of the returns",
    "The critic is worse than a constant, so advantages are noise; check reward_scale and gamma, or"
    " raise value_coefficient.",
    times=10,
)
def value_error(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
    yield from _above(row, "value_nrmse", limits.VALUE_NRMSE)


@_rule(
    "error",
    f"the gradient before clipping is above {limits.GRADIENT_JUMP:g} times the mean of earlier updates",
    "Look for an outlier among the iteration's rewards; lower reward_scale or learning_rate.",
)
def gradient_jump(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
    usual = statistics.fmean(update.grad_norm for update in past.updates) if past.updates else 0.0
    if row.skipped is None and usual > 0:
        yield above(RUN, row.grad_norm, limits.GRADIENT_JUMP * usual)


@_rule(
    "warning",
    f"more than {limits.FORCED_SHARE:.0%} of the decisions had no choice, and {_NOT_LEARNED}",
    "Little is left to learn from; give an episode more slots or fewer steps.",
    times=3,
)
def forced_share(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
    """Check the share of forced decisions (a single legal action) until the policy has learned; a trained
    policy has many of them, because it fills slots early.
    """
    if row.skipped is None:
        yield above(RUN, row.forced_share, limits.FORCED_SHARE, not past.has_learned(row))


@_rule(
    "warning",
    f"more than {limits.WAIT_SHARE:.0%} of the decisions are WAIT",
    "The policy does nothing: growth does not pay here, or costs too much at first; lower rent or raise"
    " entropy_start.",
    times=5,
)
def idle(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
    yield above(RUN, row.op_shares[OP_WAIT], limits.WAIT_SHARE)


@_rule(
    "warning",
    f"throughput of the rollout is below {limits.SLOWDOWN:.0%} of the median of all earlier iterations,"
    f" known after {limits.USUAL_ITERATIONS}",
    "Look for another process on this machine, or for memory that swaps.",
    times=5,
    of_the_machine=True,
)
def slow(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
    """Compare the rollout time with that of earlier iterations. Other phases, such as evaluation, are not
    part of every iteration and are not compared.
    """
    spans = [update.phase_ms["rollout"] for update in past.updates if "rollout" in update.phase_ms]
    if len(spans) >= limits.USUAL_ITERATIONS and "rollout" in row.phase_ms:
        yield above(RUN, row.phase_ms["rollout"], statistics.median(spans) / limits.SLOWDOWN)


# --- episodes ---------------------------------------------------------------------------------------


@_rule(
    "error",
    f"the rank correlation of return and final score (lead over the twin where it is known) is below"
    f" {limits.RANK_CORRELATION:g}",
    "Worse networks are rewarded more: a sign of the reward is flipped, or a cost outweighs the score;"
    " stop and check the reward terms.",
    window=limits.CORRELATED_EPISODES,
)
def pays_for_worse(row: EpisodeRow, past: RowHistory) -> Iterator[Reading]:
    episodes = [
        Rewarded(one.total_reward, one.val_score, one.twin_val_score)
        for one in _window(row, past)
        if one.total_reward is not None and one.val_score is not None
    ]
    correlation = reward_correlation(episodes)
    if correlation is not None:
        yield below(RUN, correlation, limits.RANK_CORRELATION)


@_rule(
    "warning",
    f"shaping terms, which do not reward the result, make up more than {limits.SHAPING_SHARE:.0%} of"
    " the absolute reward",
    "The policy optimises the shaping terms; lower them.",
    window=limits.CORRELATED_EPISODES,
)
def shaping(row: EpisodeRow, past: RowHistory) -> Iterator[Reading]:
    terms = [term for episode in _window(row, past) for term in (episode.reward_terms or {}).items()]
    total = sum(abs(amount) for _, amount in terms if amount is not None)
    if total > 0:
        extra = sum(abs(amount) for name, amount in terms if amount is not None and name not in RESULT_TERMS)
        yield above(RUN, extra / total, limits.SHAPING_SHARE)


def _window(row: EpisodeRow, past: RowHistory) -> list[EpisodeRow]:
    """Return the last ``CORRELATED_EPISODES`` rewarded episodes including ``row``; empty while there are
    fewer.
    """
    full = row.total_reward is not None and len(past.episodes) == past.episodes.maxlen
    return [*past.episodes, row] if full else []


# --- seeds ------------------------------------------------------------------------------------------


@_rule(
    "warning",
    f"a seed that trains, blends or holds has a gradient health below {limits.MIN_GRADIENT_HEALTH:g}",
    "Its gradients vanish or explode, so it does not learn; prune it, and try another blueprint there.",
    times=2,
)
def dead_seed(row: SeedRow, past: RowHistory) -> Iterator[Reading]:
    if row.gradient_health is not None:
        learns, limit = row.stage in LEARNING_STAGES, limits.MIN_GRADIENT_HEALTH
        yield below(_where(row, past.run), row.gradient_health, limit, learns)


@_rule(
    "warning",
    "outside of trainings, the contribution of a seed that holds, or blends at constant alpha, is more"
    f" than {limits.CONFIDENCE_Z:g} standard errors below 0",
    "The network is better without it; prune it before it is fossilized.",
    times=2,
)
def harmful_seed(row: SeedRow, past: RowHistory) -> Iterator[Reading]:
    """Check the contribution of a seed at constant alpha; while alpha changes, host and seed still adapt to
    each other.

    Trainings of a policy are exempt: an exploring policy may keep harmful seeds, and its reward already
    accounts for the harm.
    """
    if past.run.iterations is not None:
        return
    if row.freshness == 1.0 and row.contribution is not None and row.contribution_error is not None:
        limit = -limits.CONFIDENCE_Z * row.contribution_error
        rests = row.stage == Stage.HOLDING or _rests(row, past)
        yield below(_where(row, past.run), row.contribution, limit, rests)


def _rests(row: SeedRow, past: RowHistory) -> bool:
    last = past.seeds.get((row.env, row.slot))
    if last is None or (last.episode, last.seed) != (row.episode, row.seed):
        return False
    return row.stage == Stage.BLENDING and last.alpha == row.alpha


def _where(row: SeedRow, run: RunRow) -> str:
    return f"environment {row.env} slot {run.slots[row.slot]}"


# --- machine ----------------------------------------------------------------------------------------


@_rule(
    "error",
    f"less than {limits.DISK_FREE_MB:g} MB are free where the run is written",
    "Make room: on a full disk a run continues without rows and checkpoints, and ends with an error.",
    of_the_machine=True,
)
def disk_nearly_full(row: ResourceRow, past: RowHistory) -> Iterator[Reading]:
    yield below(RUN, row.disk_free_mb, limits.DISK_FREE_MB)


# --- names of alert rules ---------------------------------------------------------------------------

MACHINE_RULES: Final = frozenset(rule.name for rule in RULES if rule.of_the_machine)

GOVERNOR_RULES: Final[Mapping[str, str]] = {
    "non-finite": "a host's loss, or a seed, is not finite",
    "collapse": "a host that had learned scores no better than chance, two epochs in a row",
    "divergence": "a host's loss rose far above its usual fluctuation, two epochs in a row",
}
"""Alerts that come from no alert rule, with their causes: the governor of a host's training raises them when
it rolls back or prunes.
"""
