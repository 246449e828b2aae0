"""Readings of alert rules (a value, its limit, and whether the limit is violated), and the earlier rows of a
run that alert rules use.
"""

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from esper.leyline import EpisodeRow, Row, RunRow, SeedRow, UpdateRow
from esper.leyline import thresholds as limits

RUN: Final = "run"
"""Scope of an alert about the whole run."""


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
