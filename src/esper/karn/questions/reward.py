"""Is the reward honest: the terms it is made of, and whether what is paid follows the final score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from esper.karn.questions.episodes import EpisodeKey, is_training
from esper.karn.questions.places import AxisName, Place, axis_of
from esper.karn.run import Run

MOST_EPISODES: Final = 160
"""Shown one by one; of more episodes, those with similar returns are taken together."""
GROUPS: Final = 40


@dataclass(frozen=True, slots=True)
class RewardPoint:
    """What was paid at one place; None is unknown."""

    place: Place
    terms: tuple[float | None, ...]
    """Means, in the order of the names."""
    total: float | None


@dataclass(frozen=True, slots=True)
class Reward:
    """The terms over the iterations of a training, or over the epochs of an episode."""

    axis: AxisName
    end: int
    terms: tuple[str, ...]
    points: tuple[RewardPoint, ...]


@dataclass(frozen=True, slots=True)
class PaidEpisodes:
    """Episodes with the same or similar returns."""

    episodes: int
    low: float
    high: float
    """Their returns."""
    median_return: float
    quarter: float
    median: float
    three_quarters: float
    """Their final validation scores."""


@dataclass(frozen=True, slots=True)
class Honesty:
    """Return against final score, over the episodes of a training."""

    episodes: int
    rank_correlation: float | None
    """Spearman's; None: fewer than three episodes, or all alike."""
    groups: tuple[PaidEpisodes, ...]
    """By rising return; single episodes while there are few."""


def reward(run: Run, episode: EpisodeKey | None = None) -> Reward | None:
    """Per iteration or, of one episode, per epoch; None: nothing was paid."""
    axis = axis_of(run, episode)
    if not is_training(run):
        return None
    if axis.name == "iteration":
        table, place, total, condition = "update", "iteration", "mean_return", "true"
    else:
        table, place, total, condition = "decision", "epoch + 1", "reward", axis.condition
    terms = [
        name
        for (name,) in run.sql(
            f"SELECT DISTINCT unnest(map_keys(reward_terms)) AS term FROM {table} WHERE {condition}"
            " ORDER BY term",
            axis.parameters,
        ).fetchall()
    ]
    means = ", ".join(["avg(reward_terms[?])"] * len(terms) + [f"avg({total})"])
    found = run.sql(
        f"""
        SELECT min({place}), max({place}), {means} FROM {table}
        WHERE {condition} AND reward_terms IS NOT NULL GROUP BY {axis.group(place)} ORDER BY 1
        """,
        [*terms, *axis.parameters],
    ).fetchall()
    if not found:
        return None
    points = tuple(
        RewardPoint(Place(first, last), tuple(paid), all_paid) for first, last, *paid, all_paid in found
    )
    return Reward(axis.name, max(axis.end, points[-1].place.last), tuple(terms), points)


def honesty(run: Run) -> Honesty | None:
    """Over all episodes that were paid; None: there are none."""
    ((episodes, correlation),) = run.sql(
        """
        WITH ranked AS (
            SELECT rank() OVER (ORDER BY total_reward)
                       + (count(*) OVER (PARTITION BY total_reward) - 1) / 2 AS paid,
                   rank() OVER (ORDER BY val_score)
                       + (count(*) OVER (PARTITION BY val_score) - 1) / 2 AS scored
            FROM episode WHERE total_reward IS NOT NULL)
        SELECT count(*), CASE WHEN count(*) > 2 AND stddev_pop(paid) > 0 AND stddev_pop(scored) > 0
                              THEN corr(paid, scored) END
        FROM ranked
        """
    ).fetchall()
    if not episodes:
        return None
    parts = episodes if episodes <= MOST_EPISODES else GROUPS
    groups = run.sql(
        f"""
        WITH grouped AS (
            SELECT total_reward, val_score, ntile({parts}) OVER (ORDER BY total_reward, val_score) AS part
            FROM episode WHERE total_reward IS NOT NULL)
        SELECT count(*), min(total_reward), max(total_reward), median(total_reward),
               quantile_cont(val_score, 0.25), median(val_score), quantile_cont(val_score, 0.75)
        FROM grouped GROUP BY part ORDER BY part
        """
    ).fetchall()
    return Honesty(episodes, correlation, tuple(PaidEpisodes(*values) for values in groups))
