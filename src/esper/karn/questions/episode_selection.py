"""Which episodes a run holds, and which of them to show when nobody chose one."""

from typing import Final, NamedTuple, Self

from esper.karn.run import Run
from esper.karn.seed_histories import HORIZON
from esper.leyline.events import EnvRow, EpochRow

THIS_EPISODE: Final = "env = ? AND episode = ? AND attempt = ?"
"""The rows of one episode, as SQL; its key has the parameters."""
LAST_ITERATION: Final = "(SELECT max(iteration) FROM update)"
"""The last complete iteration of a training, as SQL; one that was killed may have begun another."""
IN_A_COMPLETE_ITERATION: Final = f"(iteration <= {LAST_ITERATION})"
"""Whether an episode belongs to an iteration that is complete, as SQL.

Of an iteration that is not, only the episodes that ended first are known: they do not represent it.
"""
LASTED: Final = f"(ended_by = '{HORIZON}')"
"""Whether an episode reached its horizon, as SQL. The means of an iteration are those of such episodes; one
that broke down was followed at once by another attempt."""


class EpisodeKey(NamedTuple):
    env: int
    episode: int
    attempt: int = 0

    @classmethod
    def of(cls, row: EnvRow) -> Self:
        return cls(row.env, row.episode, row.attempt)


class EpisodeSummary(NamedTuple):
    """How one episode went; None is unknown."""

    key: EpisodeKey
    iteration: int | None
    """The iteration of a training; None where nothing is trained."""
    score: float | None


def episode_name(episode: EpisodeKey, *, trained: bool) -> str:
    if not trained:
        name = f"episode {episode.episode}"
        return name if episode.env == 0 else f"environment {episode.env}, {name}"
    name = f"iteration {episode.episode + 1}, environment {episode.env}"
    return f"{name}, attempt {episode.attempt + 1}" if episode.attempt else name


def is_training(run: Run) -> bool:
    """Whether a policy is trained here; then episodes belong to iterations."""
    return run.row.iterations is not None


def episodes(run: Run) -> list[EpisodeSummary]:
    """Every episode of the run, in the order of iterations and environments; the one that goes on too."""
    score = run.row.metric
    found = run.sql(
        f"""
        WITH seen AS (SELECT env, episode, attempt, iteration, arg_max({score}, epoch) AS score
                      FROM epoch GROUP BY ALL)
        SELECT env, episode, attempt, coalesce(episode.iteration, seen.iteration),
               coalesce(episode.{score}, seen.score)
        FROM episode FULL JOIN seen USING (env, episode, attempt) ORDER BY episode, env, attempt
        """
    ).fetchall()
    return [EpisodeSummary(EpisodeKey(*key), iteration, score) for *key, iteration, score in found]


def unfinished_episode(run: Run) -> EpochRow | None:
    """The last epoch of the episode that goes on, or was not finished; None: there is no such episode."""
    unfinished = "(env, episode, attempt) NOT IN (SELECT (env, episode, attempt) FROM episode)"
    rows = run.rows(EpochRow, unfinished)
    return max(rows, key=lambda row: (row.episode, -row.env, row.epoch), default=None)


def final_episodes(run: Run) -> str:
    """The episodes whose means are a run's result, as SQL: all or, of a training, its last iteration's."""
    return f"{LASTED} AND iteration = {LAST_ITERATION}" if is_training(run) else "true"


def default_episode(run: Run) -> EpisodeKey | None:
    """The best episode of a training, the last of any other run; None if there is none yet."""
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
    ranked = run.sql("SELECT env, episode, attempt FROM episode ORDER BY val_score, episode, env").fetchall()
    names = {len(ranked) - 1: "best", len(ranked) // 2: "median", 0: "worst"} if ranked else {}
    return {name: EpisodeKey(*ranked[place]) for place, name in sorted(names.items(), reverse=True)}
