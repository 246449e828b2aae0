"""How each alert rule looks at a row: what it finds, and whether that is wrong.

A look is a pure function of the row and of the rows before it. What it cannot evaluate it leaves out:
a number that is unknown neither raises an alert nor clears it.
"""

import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from esper.leyline import limits
from esper.leyline.events import EpisodeRow, ResourceRow, Row, RunRow, SeedRow, UpdateRow
from esper.leyline.factored_actions import OP_WAIT
from esper.leyline.rank_correlation import Rewarded, reward_correlation
from esper.leyline.stages import Stage

RUN: Final = "run"
"""Scope of what is about the whole run."""
RESULT_TERMS: Final = frozenset({"lead", "score", "loss", "log_loss", "contribution", "rent", "rollback"})
"""Terms of a reward that pay for the result, for its price or for a breakdown; all others are shaping."""
NEVER_UNKNOWN: Final = ("policy_loss", "value_loss", "entropy", "approx_kl")
"""Columns of an update that are unknown only where the number was not finite."""
LEARNING_STAGES: Final = frozenset({Stage.TRAINING, Stage.BLENDING, Stage.HOLDING})
"""A seed learns, and could still be removed."""


class Reading(NamedTuple):
    """What a rule found in one row about one thing."""

    scope: str
    wrong: bool
    value: float | None
    limit: float | None


@dataclass(slots=True)
class RowHistory:
    """What rules remember of earlier rows."""

    run: RunRow
    updates: list[UpdateRow] = field(default_factory=list)
    """Those that were not left out."""
    episodes: deque[EpisodeRow] = field(default_factory=lambda: deque(maxlen=limits.CORRELATED_EPISODES - 1))
    """The last ones that were rewarded."""
    seeds: dict[tuple[int, int], SeedRow] = field(default_factory=dict)
    """The last row of each environment and slot."""

    def remember(self, row: Row) -> None:
        match row:
            case UpdateRow(skipped=None):
                self.updates.append(row)
            case EpisodeRow() if row.total_reward is not None:
                self.episodes.append(row)
            case SeedRow():
                self.seeds[row.env, row.slot] = row

    def has_learned(self, row: UpdateRow) -> bool:
        """Whether the last updates, this one included, earned clearly more than the best of the first."""
        returns = [u.mean_return for u in (*self.updates, row) if u.mean_return is not None]
        if not returns:
            return False
        opening, last = returns[: limits.OPENING_UPDATES], returns[-limits.OPENING_UPDATES :]
        gain = statistics.fmean(last) - max(opening)
        return gain > limits.LEARNED_GAIN * float(self.run.config.get("reward_scale", 1.0))


Condition = Callable[[Any, RowHistory], Iterator[Reading]]
"""The row is of the table that the rule names."""


def above(scope: str, value: float, limit: float, only_if: bool = True) -> Reading:
    return Reading(scope, value > limit and only_if, value, limit)


def below(scope: str, value: float, limit: float, only_if: bool = True) -> Reading:
    return Reading(scope, value < limit and only_if, value, limit)


# --- updates --------------------------------------------------------------------------------------


def not_finite(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
    wrong = row.skipped is not None or any(getattr(row, name) is None for name in NEVER_UNKNOWN)
    yield Reading(RUN, wrong, None, None)


def ratio_exploded(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
    """By the worst decision of the first update epoch that exploded, and the extremes of the last one."""
    low, high = limits.RATIO_EXPLODED
    ratios = [row.ratio_max, row.ratio_min] if row.skipped is None else []
    if row.explosion is not None:
        ratios.append(row.explosion["ratio"])
    for ratio in ratios:
        if ratio is None or not low <= ratio <= high:  # None: it overflowed
            yield Reading(RUN, True, ratio, low if ratio is not None and ratio < low else high)
            return
    if ratios:
        yield Reading(RUN, False, row.ratio_max, high)


def divergence_above(times_target: float) -> Condition:
    def look(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
        target = past.run.config.get("target_kl")
        if row.skipped is None and row.approx_kl is not None and target is not None:
            yield above(RUN, row.approx_kl, times_target * target)

    return look


def update_above(column: str, limit: float) -> Condition:
    def look(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
        value = getattr(row, column)
        if row.skipped is None and value is not None:
            yield above(RUN, value, limit)

    return look


def forced(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
    """Few decisions are free at the end of a good training too, when slots are filled early."""
    if row.skipped is None:
        yield above(RUN, row.forced_share, limits.FORCED_SHARE, not past.has_learned(row))


def waits(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
    yield above(RUN, row.op_shares[OP_WAIT], limits.WAIT_SHARE)


def heads_collapsed(row: UpdateRow, past: RowHistory) -> Iterator[Reading]:
    """A head that made up its mind is what training is for, unless it did so all at once or for nothing."""
    learned = past.has_learned(row)
    for head, (name, entropy) in enumerate(zip(past.run.heads, row.head_entropy, strict=False)):
        if entropy is not None:
            is_early = not learned or _was_open(head, past.updates)
            yield below(f"head {name}", entropy, limits.HEAD_ENTROPY_COLLAPSED, is_early)


def _was_open(head: int, updates: Sequence[UpdateRow]) -> bool:
    """Whether the head explored when it was last not collapsed."""
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
    """Only rollouts are alike from iteration to iteration; evaluations are not due in all of them."""
    spans = [update.phase_ms["rollout"] for update in past.updates if "rollout" in update.phase_ms]
    if len(spans) >= limits.USUAL_ITERATIONS and "rollout" in row.phase_ms:
        yield above(RUN, row.phase_ms["rollout"], statistics.median(spans) / limits.SLOWDOWN)


# --- episodes ----------------------------------------------------------------------------------------


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
    """The last episodes that were rewarded, this one last; none while they are too few."""
    full = row.total_reward is not None and len(past.episodes) == past.episodes.maxlen
    return [*past.episodes, row] if full else []


# --- seeds ----------------------------------------------------------------------------------------


def dead(row: SeedRow, past: RowHistory) -> Iterator[Reading]:
    if row.gradient_health is not None:
        learns, limit = row.stage in LEARNING_STAGES, limits.MIN_GRADIENT_HEALTH
        yield below(_where(row, past.run), row.gradient_health, limit, learns)


def harmful(row: SeedRow, past: RowHistory) -> Iterator[Reading]:
    """Only at rest: while alpha moves, a seed and its host are still getting used to one another.

    And not in trainings: a policy that explores must be allowed to hold what hurts; its reward shows that.
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


# --- the machine ----------------------------------------------------------------------------------


def disk_full(row: ResourceRow, past: RowHistory) -> Iterator[Reading]:
    yield below(RUN, row.disk_free_mb, limits.DISK_FREE_MB)
