"""Whether the reward follows its purpose: returns of episodes against what growth gained in them.

The alert ``pays-for-worse`` and the figure "Is the reward honest?" are both this function.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Rewarded(NamedTuple):
    """The end of one episode that was rewarded."""

    total_reward: float
    val_score: float
    twin_val_score: float | None
    """None: no twin is known."""


def gains(episodes: Sequence[Rewarded]) -> list[float]:
    """What growth is for: the lead over the twin if all twins are known, else the final score."""
    if any(episode.twin_val_score is None for episode in episodes):
        return [episode.val_score for episode in episodes]
    return [episode.val_score - (episode.twin_val_score or 0.0) for episode in episodes]


def reward_correlation(episodes: Sequence[Rewarded]) -> float | None:
    """Spearman's rank correlation of returns and gains; None: too few episodes, or one does not vary."""
    if len(episodes) < 3:
        return None
    return rank_correlation(_rounded(one.total_reward for one in episodes), _rounded(gains(episodes)))


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's: the correlation of the ranks; None where one of them does not vary."""
    try:
        return statistics.correlation(_ranks(a), _ranks(b))
    except statistics.StatisticsError:
        return None


def _rounded(values: Iterable[float]) -> list[float]:
    """Without rounding errors of floating point, which would rank episodes that are equal."""
    return [round(value, 6) for value in values]


def _ranks(values: Sequence[float]) -> list[float]:
    """Place of each in sorted order; equals share their mean place."""
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [statistics.fmean(places[value]) for value in values]
