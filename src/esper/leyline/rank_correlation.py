"""Rank correlation between the returns of episodes and their score gains by growth.

The alert ``pays-for-worse`` and the chart "Is the reward honest?" use this rank correlation: a negative value
means that the reward is higher for worse networks.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Rewarded(NamedTuple):
    """Return of one episode, its final score, and the final score of its twin without growth."""

    total_reward: float
    val_score: float
    twin_val_score: float | None
    """Final score of the twin without growth; None if the episode has no twin."""


def gains(episodes: Sequence[Rewarded]) -> list[float]:
    """Return the final score of each episode minus that of its twin without growth; if any episode lacks a
    twin, return the final scores."""
    if any(episode.twin_val_score is None for episode in episodes):
        return [episode.val_score for episode in episodes]
    return [episode.val_score - (episode.twin_val_score or 0.0) for episode in episodes]


def reward_correlation(episodes: Sequence[Rewarded]) -> float | None:
    """Return Spearman's rank correlation between the returns of episodes and their score gains by growth.

    The rank correlation is None for fewer than three episodes, or if all returns or all gains are equal.
    """
    if len(episodes) < 3:
        return None
    try:
        return statistics.correlation(_ranks(one.total_reward for one in episodes), _ranks(gains(episodes)))
    except statistics.StatisticsError:
        return None


def _ranks(values: Iterable[float]) -> list[float]:
    """Return the rank of each of ``values``; values that are equal to six decimals share their mean rank.

    Without rounding to six decimals, numerical errors would give equal episodes different ranks.
    """
    rounded = [round(value, 6) for value in values]
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(rounded)):
        places.setdefault(value, []).append(place)
    return [statistics.fmean(places[value]) for value in rounded]
