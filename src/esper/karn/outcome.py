"""What a run came to, in numbers: where it stands, its scores and their cost, and what other runs came to.

A run is judged by its finished lives; a training by those of its last round that lasted, since the policy
that led them is the one it arrived at, and the round's own row counts no others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from esper.karn.questions.lives import LAST_ROUND, LASTED, ROUND, LifeKey, is_training, judged
from esper.karn.questions.progress import Progress, progress
from esper.karn.run import Run
from esper.karn.statistics import Estimate, estimate
from esper.karn.summary import total_flops
from esper.leyline.events import EpisodeRow, UpdateRow


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a run is, or where it ended; None is unknown, or does not apply."""

    progress: Progress
    rounds: int | None
    """Rounds that are done; None where nothing is trained."""
    lives: int
    """Finished ones."""
    planned_lives: int | None
    life: LifeKey | None
    """The life that is not finished, if rows of one are known."""
    epoch: int | None
    """Its finished epochs."""
    horizon: int


@dataclass(frozen=True, slots=True)
class Result:
    """Finished lives together: means with their intervals, each of one life."""

    lives: int
    val_score: Estimate
    test_score: Estimate
    twin_score: Estimate | None
    """None: none of these lives has a twin."""
    lead: Estimate | None
    """Validation score over that of the twin, life by life."""
    params: Estimate
    host_params: Estimate
    flops_per_sample: Estimate
    host_flops_per_sample: Estimate
    flops: Estimate
    """All compute of a life."""
    seconds: Estimate


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Argmax lives of a policy on rng seeds kept for its selection."""

    round: int
    mean_return: float
    score: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Another run, and the differences of lives that both led from the same random streams."""

    run: Run
    standing: Standing
    result: Result | None
    """None: it has no finished life."""
    pairs: int
    val_score: Estimate | None
    """How far the run lies above the other one, pair by pair; None without pairs."""
    test_score: Estimate | None
    unpaired: str | None
    """Why there are no pairs."""


def standing(run: Run) -> Standing:
    """Where the run is, from its rows."""
    ((lives,),) = run.sql("SELECT count(*) FROM episode").fetchall()
    going = run.sql(
        """
        SELECT env, episode, max(epoch) FROM epoch ANTI JOIN episode USING (env, episode)
        GROUP BY env, episode ORDER BY episode DESC, env LIMIT 1
        """
    ).fetchall()
    reached, trained = progress(run), is_training(run)
    episodes = run.row.config.get("episodes")
    return Standing(
        progress=reached,
        rounds=reached.done if trained else None,
        lives=lives,
        planned_lives=episodes if isinstance(episodes, int) and not trained else None,
        life=LifeKey(going[0][0], going[0][1]) if going else None,
        epoch=going[0][2] if going else None,
        horizon=run.row.horizon,
    )


def judged_lives(run: Run) -> list[EpisodeRow]:
    """Those that say what a run came to."""
    return run.rows(EpisodeRow, judged(run))


def lives_of_round(run: Run, number: int) -> list[EpisodeRow]:
    """The lives of one round of a training that lasted."""
    return run.rows(EpisodeRow, f"{LASTED} AND {ROUND} = ?", [number])


def broken_lives(run: Run) -> int:
    """Lives of the last round of a training that broke down."""
    ((number,),) = run.sql(
        f"SELECT count(*) FROM episode WHERE NOT {LASTED} AND {ROUND} = {LAST_ROUND}"
    ).fetchall()
    return int(number)


def result(rows: Sequence[EpisodeRow]) -> Result | None:
    """What these lives came to; None if there are none."""
    if not rows:
        return None
    twins = [(row.val_score, row.twin_val_score) for row in rows if row.twin_val_score is not None]

    def mean(value: Callable[[EpisodeRow], float]) -> Estimate:
        return estimate([value(row) for row in rows])

    return Result(
        lives=len(rows),
        val_score=mean(lambda row: row.val_score),
        test_score=mean(lambda row: row.test_score),
        twin_score=estimate([twin for _, twin in twins]) if twins else None,
        lead=estimate([score - twin for score, twin in twins]) if twins else None,
        params=mean(lambda row: row.params),
        host_params=mean(lambda row: row.host_params),
        flops_per_sample=mean(lambda row: row.flops_per_sample),
        host_flops_per_sample=mean(lambda row: row.host_flops_per_sample),
        flops=mean(lambda row: total_flops(row.flops)),
        seconds=mean(lambda row: row.seconds),
    )


def best_evaluation(run: Run) -> Evaluation | None:
    """The evaluation by which the best policy of a training was chosen; None: there was none yet."""
    rows = run.rows(UpdateRow, "evaluation_return IS NOT NULL")
    best = max(rows, key=lambda row: row.evaluation_return or 0.0, default=None)
    if best is None or best.evaluation_return is None:
        return None
    return Evaluation(best.round, best.evaluation_return, best.evaluation_score)


def compare(run: Run, other: Run) -> Comparison:
    """The run against another one; lives are paired where both began them alike."""
    ours, theirs = judged_lives(run), judged_lives(other)
    unpaired = _difference_of_origin(run, other)
    control = {LifeKey(row.env, row.episode): row for row in theirs}
    pairs = [(row, control[key]) for row in ours if (key := LifeKey(row.env, row.episode)) in control]
    if unpaired is not None:
        pairs = []
    elif not pairs:
        unpaired = "they have no finished life in common"
    return Comparison(
        run=other,
        standing=standing(other),
        result=result(theirs),
        pairs=len(pairs),
        val_score=estimate([a.val_score - b.val_score for a, b in pairs]) if pairs else None,
        test_score=estimate([a.test_score - b.test_score for a, b in pairs]) if pairs else None,
        unpaired=unpaired,
    )


def _difference_of_origin(run: Run, other: Run) -> str | None:
    """What keeps lives of two runs from beginning alike; None: nothing does."""
    origins = (
        ("tasks", run.row.task, other.row.task),
        ("data", run.row.data_hash[:8], other.row.data_hash[:8]),
        ("rng seeds", run.row.rng_seed, other.row.rng_seed),
        ("horizons", run.row.horizon, other.row.horizon),
        ("siblings", run.row.config.get("siblings", 1), other.row.config.get("siblings", 1)),
    )
    for name, ours, theirs in origins:
        if ours != theirs:
            return f"their {name} differ: {ours} here, {theirs} there"
    return None
