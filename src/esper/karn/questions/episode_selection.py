"""Episodes of a run, and the choice of the episodes that pages and screens show by default."""

from typing import Final, NamedTuple, Self

from esper.karn.run import Run
from esper.karn.seed_histories import HORIZON
from esper.leyline.rows import EnvRow, EpochRow

THIS_EPISODE: Final = "env = ? AND episode = ? AND attempt = ?"
"""SQL condition for the rows of one episode; its three ``?`` are the fields of an ``EpisodeKey``."""
LAST_ITERATION: Final = "(SELECT max(iteration) FROM update)"
"""SQL for the last complete iteration of a training; a killed training may have started a further iteration.
"""
IN_A_COMPLETE_ITERATION: Final = f"(iteration <= {LAST_ITERATION})"
"""SQL condition for episodes of complete iterations.

An incomplete iteration has only the episodes that ended first, which are not a representative sample.
"""
LASTED: Final = f"(ended_by = '{HORIZON}')"
"""SQL condition for episodes that reached their horizon.

Means over an iteration use only the episodes that reached their horizon. An episode that broke down is
repeated at once as another attempt.
"""


class EpisodeKey(NamedTuple):
    """Key of an episode within a run: environment, number of the episode, and attempt."""

    env: int
    episode: int
    attempt: int = 0

    @classmethod
    def of(cls, row: EnvRow) -> Self:
        return cls(row.env, row.episode, row.attempt)


class EpisodeSummary(NamedTuple):
    """Key, iteration and last score of an episode; a score of None is unknown."""

    key: EpisodeKey
    iteration: int | None
    """Iteration of the episode in a policy training; None in other runs."""
    score: float | None


def episode_name(run: Run, episode: EpisodeKey) -> str:
    """Return the display name of an episode; in a policy training the name contains the iteration."""
    if not run.is_training:
        name = f"episode {episode.episode}"
        return name if episode.env == 0 else f"environment {episode.env}, {name}"
    name = f"iteration {episode.episode + 1}, environment {episode.env}"
    return f"{name}, attempt {episode.attempt + 1}" if episode.attempt else name


def episodes(run: Run) -> list[EpisodeSummary]:
    """Return every episode of a run in order of iterations and environments, including unfinished
    episodes.
    """
    score = run.row.metric
    found = run.fetch(
        f"""
        WITH seen AS (SELECT env, episode, attempt, iteration, arg_max({score}, epoch) AS score
                      FROM epoch GROUP BY ALL)
        SELECT env, episode, attempt, coalesce(episode.iteration, seen.iteration),
               coalesce(episode.{score}, seen.score)
        FROM episode FULL JOIN seen USING (env, episode, attempt) ORDER BY episode, env, attempt
        """
    )
    return [EpisodeSummary(EpisodeKey(*key), iteration, score) for *key, iteration, score in found]


def unfinished_episode(run: Run) -> EpochRow | None:
    """Return the row of the last epoch of the latest unfinished episode; None if all episodes are
    finished.
    """
    unfinished = "(env, episode, attempt) NOT IN (SELECT (env, episode, attempt) FROM episode)"
    rows = run.rows(EpochRow, unfinished)
    return max(rows, key=lambda row: (row.episode, -row.env, row.epoch), default=None)


def default_episode(run: Run) -> EpisodeKey | None:
    """Return the best episode of a policy training, or the last episode of any other run; None if the run has
    no episode.
    """
    if not run.is_training:
        keys = [episode.key for episode in episodes(run)]
        return max(keys, key=lambda key: (key.episode, -key.env), default=None)
    query = "SELECT env, episode, attempt FROM episode ORDER BY val_score DESC, episode DESC, env LIMIT 1"
    found = run.fetch(query)
    return EpisodeKey(*found[0]) if found else None


def notable_episodes(run: Run) -> dict[str, EpisodeKey]:
    """Return the best, median and worst finished episode by validation score; the same episode is not
    returned twice.
    """
    ranked = run.fetch("SELECT env, episode, attempt FROM episode ORDER BY val_score, episode, env")
    names = {0: "worst", len(ranked) // 2: "median", len(ranked) - 1: "best"} if ranked else {}
    return {name: EpisodeKey(*ranked[place]) for place, name in sorted(names.items(), reverse=True)}
