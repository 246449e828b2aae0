"""Which episodes a run holds, and which of them to show when nobody chose one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from esper.karn.episodes import HORIZON
from esper.karn.run import Run

LAST_ITERATION: Final = "(SELECT max(iteration) FROM update)"
"""The last iteration of a training that is complete, as SQL; a killed one may have begun another."""
IN_A_COMPLETE_ITERATION: Final = f"(iteration <= {LAST_ITERATION})"
"""Whether an episode of a training belongs to an iteration that is complete, as SQL. The episodes of one that is not
are those that were lived first, or broke down: they do not stand for their iteration."""
LASTED: Final = f"(ended_by = '{HORIZON}')"
"""Whether an episode reached its horizon, as SQL. An iteration of a training is judged by those that did, as its own
row judges it; one that broke down was followed at once by a fresh one."""


class EpisodeKey(NamedTuple):
    """One episode of a run."""

    env: int
    episode: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """How one episode went; None is unknown, as while it goes on."""

    key: EpisodeKey
    iteration: int | None
    """The iteration of a training; None where nothing is trained."""
    epochs: int
    score: float | None
    twin_score: float | None
    params: int | None
    total_reward: float | None
    ended_by: str | None


def episode_name(episode: EpisodeKey, *, trained: bool) -> str:
    """An episode in words."""
    if not trained:
        return (
            f"episode {episode.episode}"
            if episode.env == 0
            else f"environment {episode.env}, episode {episode.episode}"
        )
    name = f"iteration {episode.episode + 1}, environment {episode.env}"
    return f"{name}, attempt {episode.attempt + 1}" if episode.attempt else name


def is_training(run: Run) -> bool:
    """Whether a policy is trained here; then episodes belong to iterations."""
    return run.row.iterations is not None


def episodes(run: Run) -> list[EpisodeSummary]:
    """Every episode of the run, in the order of iterations and environments; the one that goes on too."""
    found = run.sql(
        """
        WITH seen AS (SELECT env, episode, attempt, iteration, max(epoch) AS epochs, last(params) AS params,
                             last(val_score) AS score, last(twin_score) AS twin
                      FROM epoch GROUP BY ALL)
        SELECT env, episode, attempt, coalesce(episode.iteration, seen.iteration),
               coalesce(episode.epoch, seen.epochs), coalesce(episode.val_score, seen.score),
               coalesce(episode.twin_val_score, seen.twin), coalesce(episode.params, seen.params),
               episode.total_reward, episode.ended_by
        FROM episode FULL JOIN seen USING (env, episode, attempt)
        ORDER BY episode, env, attempt
        """
    ).fetchall()
    return [
        EpisodeSummary(
            key=EpisodeKey(env, episode, attempt),
            iteration=iteration,
            epochs=epochs,
            score=score,
            twin_score=twin,
            params=params,
            total_reward=reward,
            ended_by=ended_by,
        )
        for env, episode, attempt, iteration, epochs, score, twin, params, reward, ended_by in found
    ]


def judged(run: Run) -> str:
    """Which finished episodes say what a run came to, as SQL: all or, of a training, its last iteration's."""
    return f"{LASTED} AND iteration = {LAST_ITERATION}" if is_training(run) else "true"


def default_episode(run: Run) -> EpisodeKey | None:
    """The best episode of a training, the last of any other run; None if nothing lived yet."""
    if is_training(run):
        query = "SELECT env, episode, attempt FROM episode ORDER BY val_score DESC, episode DESC, env LIMIT 1"
    else:
        query = """
            SELECT env, episode, attempt FROM (FROM epoch SELECT env, episode, attempt UNION
                                               FROM episode SELECT env, episode, attempt)
            ORDER BY episode DESC, env LIMIT 1
            """
    found = run.sql(query).fetchall()
    return EpisodeKey(*found[0]) if found else None


def notable_episodes(run: Run) -> dict[str, EpisodeKey]:
    """The best, the median and the worst finished episode by validation score; fewer where fewer ended."""
    found = run.sql(
        """
        WITH ranked AS (SELECT env, episode, attempt,
                               row_number() OVER (ORDER BY val_score, episode, env) AS place,
                               count(*) OVER () AS episodes FROM episode)
        SELECT place, episodes, env, episode, attempt FROM ranked WHERE place IN (1, episodes // 2 + 1, episodes)
        """
    ).fetchall()
    keys = {place: EpisodeKey(*key) for place, _, *key in found}
    if not found:
        return {}
    episodes = found[0][1]
    names = {episodes: "best", episodes // 2 + 1: "median", 1: "worst"}
    return {name: keys[place] for place, name in sorted(names.items(), reverse=True)}
