"""Rank correlation between returns of episodes and their gain by growth.

The alert ``pays-for-worse`` and the figure "Is the reward honest?" use the correlation: a negative value
shows a reward that is higher for worse networks.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Rewarded(NamedTuple):
    """Return of one episode, its final score and the final score of its twin."""

    total_reward: float
    val_score: float
    twin_val_score: float | None
    """Final score of the twin, None if the episode has no twin."""


def gains(episodes: Sequence[Rewarded]) -> list[float]:
    """Return the lead over the twin of each episode; the final score if an episode has no twin."""
    if any(episode.twin_val_score is None for episode in episodes):
        return [episode.val_score for episode in episodes]
    return [episode.val_score - (episode.twin_val_score or 0.0) for episode in episodes]


def reward_correlation(episodes: Sequence[Rewarded]) -> float | None:
    """Return Spearman's rank correlation of returns and gains.

    The correlation is None for fewer than three episodes, or if returns or gains are constant.
    """
    if len(episodes) < 3:
        return None
    try:
        return statistics.correlation(_ranks(one.total_reward for one in episodes), _ranks(gains(episodes)))
    except statistics.StatisticsError:
        return None


def _ranks(values: Iterable[float]) -> list[float]:
    """Return the rank of each value; values equal to six decimals share their mean rank.

    Without rounding, numerical errors would give equal episodes different ranks.
    """
    rounded = [round(value, 6) for value in values]
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(rounded)):
        places.setdefault(value, []).append(place)
    return [statistics.fmean(places[value]) for value in rounded]
