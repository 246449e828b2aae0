"""Which host lives a run holds, and which of them to show when nobody chose one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from esper.karn.lives import HORIZON
from esper.karn.run import Run
from esper.leyline.events import RESTART, round_of

ROUND: Final = f"(episode % {RESTART} + 1)"
"""The round of a training that a life belongs to, as SQL."""

LAST_ROUND: Final = "(SELECT max(round) FROM update)"
"""The last round of a training that is complete, as SQL; a killed one may have begun another."""
IN_A_COMPLETE_ROUND: Final = f"({ROUND} <= {LAST_ROUND})"
"""Whether a life of a training belongs to a round that is complete, as SQL. The lives of one that is not
are those that were lived first, or broke down: they do not stand for their round."""
LASTED: Final = f"(ended_by = '{HORIZON}')"
"""Whether a life reached its horizon, as SQL. A round of a training is judged by those that did, as its own
row judges it; one that broke down was followed at once by a fresh one."""


class LifeKey(NamedTuple):
    """One host life of a run."""

    env: int
    episode: int


@dataclass(frozen=True, slots=True)
class LifeSummary:
    """How one life went; None is unknown, as while it goes on."""

    key: LifeKey
    round: int | None
    """The round of a training; None where nothing is trained."""
    epochs: int
    score: float | None
    twin_score: float | None
    params: int | None
    total_reward: float | None
    ended_by: str | None


def life_name(life: LifeKey, *, trained: bool) -> str:
    """A life in words."""
    if not trained:
        return f"life {life.episode}" if life.env == 0 else f"environment {life.env}, life {life.episode}"
    restart, episode = divmod(life.episode, RESTART)
    name = f"round {episode + 1}, environment {life.env}"
    return f"{name}, restart {restart}" if restart else name


def is_training(run: Run) -> bool:
    """Whether a policy is trained here; then lives belong to rounds."""
    return run.row.rounds is not None


def lives(run: Run) -> list[LifeSummary]:
    """Every life of the run, in the order of rounds and environments; the one that goes on too."""
    found = run.sql(
        """
        WITH seen AS (SELECT env, episode, max(epoch) AS epochs, last(params) AS params,
                             last(val_score) AS score, last(twin_score) AS twin
                      FROM epoch GROUP BY env, episode)
        SELECT env, episode, coalesce(episode.epoch, seen.epochs), coalesce(episode.val_score, seen.score),
               coalesce(episode.twin_val_score, seen.twin), coalesce(episode.params, seen.params),
               episode.total_reward, episode.ended_by
        FROM episode FULL JOIN seen USING (env, episode)
        ORDER BY episode % ?, env, episode
        """,
        [RESTART],
    ).fetchall()
    trained = is_training(run)
    return [
        LifeSummary(
            key=LifeKey(env, episode),
            round=round_of(episode) if trained else None,
            epochs=epochs,
            score=score,
            twin_score=twin,
            params=params,
            total_reward=reward,
            ended_by=ended_by,
        )
        for env, episode, epochs, score, twin, params, reward, ended_by in found
    ]


def judged(run: Run) -> str:
    """Which finished lives say what a run came to, as SQL: all or, of a training, its last round's."""
    return f"{LASTED} AND {ROUND} = {LAST_ROUND}" if is_training(run) else "true"


def default_life(run: Run) -> LifeKey | None:
    """The best life of a training, the last of any other run; None if nothing lived yet."""
    if is_training(run):
        query = "SELECT env, episode FROM episode ORDER BY val_score DESC, episode DESC, env LIMIT 1"
    else:
        query = """
            SELECT env, episode FROM (SELECT env, episode FROM epoch UNION SELECT env, episode FROM episode)
            ORDER BY episode DESC, env LIMIT 1
            """
    found = run.sql(query).fetchall()
    return LifeKey(*found[0]) if found else None


def notable_lives(run: Run) -> dict[str, LifeKey]:
    """The best, the median and the worst finished life by validation score; fewer where fewer ended."""
    found = run.sql(
        """
        WITH ranked AS (SELECT env, episode, row_number() OVER (ORDER BY val_score, episode, env) AS place,
                               count(*) OVER () AS lives FROM episode)
        SELECT place, lives, env, episode FROM ranked WHERE place IN (1, lives // 2 + 1, lives)
        """
    ).fetchall()
    keys = {place: LifeKey(env, episode) for place, _, env, episode in found}
    if not found:
        return {}
    lives = found[0][1]
    names = {lives: "best", lives // 2 + 1: "median", 1: "worst"}
    return {name: keys[place] for place, name in sorted(names.items(), reverse=True)}
