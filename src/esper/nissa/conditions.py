"""Conditions of the alert rules: functions from a telemetry row and earlier rows to readings (a value, its
limit, and whether the limit is violated).

An unknown value yields no reading of an alert rule, so it neither raises nor clears an alert.
"""

import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from esper.leyline import OP_WAIT, EpisodeRow, ResourceRow, Row, RunRow, SeedRow, Stage, UpdateRow
from esper.leyline import thresholds as limits
from esper.leyline.rank_correlation import Rewarded, reward_correlation

RUN: Final = "run"
"""Scope of an alert about the whole run."""
RESULT_TERMS: Final = frozenset({"lead", "score", "loss", "log_loss", "contribution", "rent", "rollback"})
"""Names of the reward terms for the quality of the network, its cost or a breakdown; all other reward terms
are shaping.
"""
NEVER_UNKNOWN: Final = ("policy_loss", "value_loss", "entropy", "approx_kl")
"""Columns of a PPO update row that are None only if the value was not finite."""
LEARNING_STAGES: Final = frozenset({Stage.TRAINING, Stage.BLENDING, Stage.HOLDING})
"""Stages in which a seed learns and can still be pruned: TRAINING, BLENDING and HOLDING."""


class Reading(NamedTuple):
    """Value that an alert rule read from one row for one scope (run, policy head or slot), with its limit."""

    scope: str
    wrong: bool
    value: float | None
    limit: float | None


@dataclass(slots=True)
class RowHistory:
    """Earlier rows of a run that the conditions of alert rules use."""

    run: RunRow
    updates: list[UpdateRow] = field(default_factory=list)
    """Rows of those PPO updates that were not skipped."""
    episodes: deque[EpisodeRow] = field(default_factory=lambda: deque(maxlen=limits.CORRELATED_EPISODES - 1))
    """Rows of the last rewarded episodes (episodes that have a total reward)."""
    seeds: dict[tuple[int, int], SeedRow] = field(default_factory=dict)
    """Last seed row of each slot, by environment and slot."""

    def remember(self, row: Row) -> None:
        """Add a row to the history if conditions of alert rules use rows of its type."""
        match row:
            case UpdateRow(skipped=None):
                self.updates.append(row)
            case EpisodeRow() if row.total_reward is not None:
                self.episodes.append(row)
            case SeedRow():
                self.seeds[row.env, row.slot] = row

    def has_learned(self, row: UpdateRow) -> bool:
        """Return whether the policy has learned: the mean of its last returns, that of ``row`` included,
        exceeds the best of its first returns by more than ``LEARNED_GAIN``.
        """
        returns = [u.mean_return for u in (*self.updates, row) if u.mean_return is not None]
        if not returns:
            return False
        opening, last = returns[: limits.OPENING_UPDATES], returns[-limits.OPENING_UPDATES :]
        gain = statistics.fmean(last) - max(opening)
        return gain > limits.LEARNED_GAIN * float(self.run.config.get("reward_scale", 1.0))


Condition = Callable[[Any, RowHistory], Iterator[Reading]]
"""Condition of an alert rule: a function from a row and the earlier rows of the run to readings."""


def above(scope: str, value: float, limit: float, only_if: bool = True) -> Reading:
    """Return the reading of an alert rule; it is a violation if ``value`` is above ``limit`` and ``only_if``
    is true.
    """
    return Reading(scope, value > limit and only_if, value, limit)


def below(scope: str, value: float, limit: float, only_if: bool = True) -> Reading:
    """Return the reading of an alert rule; it is a violation if ``value`` is below ``limit`` and ``only_if``
    is true.
    """
    return Reading(scope, value < limit and only_if, value, limit)


# --- updates ----------------------------------------------------------------------------------------


def not_finite(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
    wrong = row.skipped is not None or any(getattr(row, name) is None for name in NEVER_UNKNOWN)
    yield Reading(RUN, wrong, None, None)


def ratio_exploded(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
    """Check the PPO ratios: the largest and the smallest ratio of the last update epoch, and the ratio in
    ``explosion``, which is from the first update epoch with an extreme ratio.
    """
    low, high = limits.RATIO_EXPLODED
    ratios = [row.ratio_max, row.ratio_min] if row.skipped is None else []
    if row.explosion is not None:
        ratios.append(row.explosion["ratio"])
    for ratio in ratios:
        if ratio is None or not low <= ratio <= high:  # A PPO ratio that overflowed is None.
            yield Reading(RUN, True, ratio, low if ratio is not None and ratio < low else high)
            return
    if ratios:
        yield Reading(RUN, False, row.ratio_max, high)


def update_above(column: str, limit: float, setting: str | None = None) -> Condition:
    """Return the condition that a column is above ``limit``, or above ``limit`` times a setting of the
    run.
    """

    def look(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
        value, unit = getattr(row, column), 1.0 if setting is None else past.run.config.get(setting)
        if row.skipped is None and value is not None and unit is not None:
            yield above(RUN, value, limit * unit)

    return look


def forced(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
    """Check the share of forced decisions (a single legal action) until the policy has learned; a trained
    policy has many of them, because it fills slots early.
    """
    if row.skipped is None:
        yield above(RUN, row.forced_share, limits.FORCED_SHARE, not past.has_learned(row))


def waits(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
    yield above(RUN, row.op_shares[OP_WAIT], limits.WAIT_SHARE)


def heads_collapsed(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
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


def gradient_jump(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
    usual = statistics.fmean(update.grad_norm for update in past.updates) if past.updates else 0.0
    if row.skipped is None and usual > 0:
        yield above(RUN, row.grad_norm, limits.GRADIENT_JUMP * usual)


def slow(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
    """Compare the rollout time with that of earlier iterations. Other phases, such as evaluation, are not
    part of every iteration and are not compared.
    """
    spans = [update.phase_ms["rollout"] for update in past.updates if "rollout" in update.phase_ms]
    if len(spans) >= limits.USUAL_ITERATIONS and "rollout" in row.phase_ms:
        yield above(RUN, row.phase_ms["rollout"], statistics.median(spans) / limits.SLOWDOWN)


# --- episodes ---------------------------------------------------------------------------------------


def pays_for_worse(row: EpisodeRow, past: RowHistory) -> Iterator[Reading]:
    episodes = [
        Rewarded(one.total_reward, one.val_score, one.twin_val_score)
        for one in _window(row, past)
        if one.total_reward is not None and one.val_score is not None
    ]
    correlation = reward_correlation(episodes)
    if correlation is not None:
        yield below(RUN, correlation, limits.RANK_CORRELATION)


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


def dead(row: SeedRow, past: RowHistory) -> Iterator[Reading]:
    if row.gradient_health is not None:
        learns, limit = row.stage in LEARNING_STAGES, limits.MIN_GRADIENT_HEALTH
        yield below(_where(row, past.run), row.gradient_health, limit, learns)


def harmful(row: SeedRow, past: RowHistory) -> Iterator[Reading]:
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


def disk_full(row: ResourceRow, past: RowHistory) -> Iterator[Reading]:
    yield below(RUN, row.disk_free_mb, limits.DISK_FREE_MB)
