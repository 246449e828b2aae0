"""What a run came to, in numbers: how far it is, its scores and their cost, and what other runs came to.

The result of a run is the mean of its finished episodes; that of a training, of the episodes of its last
iteration that reached their horizon: the policy that led them is the one it arrived at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from esper.karn.questions.episodes import LAST_ITERATION, LASTED, EpisodeKey, final_episodes
from esper.karn.run import Run
from esper.karn.statistics import Estimate, estimate
from esper.karn.summary import total_flops
from esper.leyline.events import EpisodeRow, UpdateRow


@dataclass(frozen=True, slots=True)
class Result:
    """Finished episodes together: means with their intervals, each of one episode."""

    episodes: int
    val_score: Estimate
    test_score: Estimate
    twin_score: Estimate | None
    """None: none of these episodes has a twin."""
    lead: Estimate | None
    """Validation score over that of the twin, episode by episode."""
    params: Estimate
    host_params: Estimate
    flops_per_sample: Estimate
    host_flops_per_sample: Estimate
    flops: Estimate
    """All compute of an episode."""
    seconds: Estimate


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Argmax episodes of a policy on rng seeds kept for its selection."""

    iteration: int
    mean_return: float
    score: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Another run, and the differences of episodes that both led from the same random streams."""

    run: Run
    result: Result | None
    """None: it has no finished episode."""
    pairs: int
    val_score: Estimate | None
    """How far the run lies above the other one, pair by pair; None without pairs."""
    test_score: Estimate | None
    unpaired: str | None
    """Why there are no pairs."""


def final_rows(run: Run) -> list[EpisodeRow]:
    """The episodes whose means are the run's result."""
    return run.rows(EpisodeRow, final_episodes(run))


def episodes_of_iteration(run: Run, number: int) -> list[EpisodeRow]:
    """The episodes of one iteration of a training that lasted."""
    return run.rows(EpisodeRow, f"{LASTED} AND iteration = ?", [number])


def broken_episodes(run: Run) -> int:
    """Episodes of the last iteration of a training that broke down."""
    ((number,),) = run.sql(
        f"SELECT count(*) FROM episode WHERE NOT {LASTED} AND iteration = {LAST_ITERATION}"
    ).fetchall()
    return int(number)


def result(rows: Sequence[EpisodeRow]) -> Result | None:
    """What these episodes came to; None if there are none."""
    if not rows:
        return None
    twins = [(row.val_score, row.twin_val_score) for row in rows if row.twin_val_score is not None]

    def mean(value: Callable[[EpisodeRow], float]) -> Estimate:
        return estimate([value(row) for row in rows])

    return Result(
        episodes=len(rows),
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
    return Evaluation(best.iteration, best.evaluation_return, best.evaluation_score)


def compare(run: Run, other: Run) -> Comparison:
    """The run against another one; episodes are paired where both began them alike."""
    ours, theirs = final_rows(run), final_rows(other)
    unpaired = _difference_of_origin(run, other)
    control = {_key(row): row for row in theirs}
    pairs = [(row, control[key]) for row in ours if (key := _key(row)) in control]
    if unpaired is not None:
        pairs = []
    elif not pairs:
        unpaired = "they have no finished episode in common"
    return Comparison(
        run=other,
        result=result(theirs),
        pairs=len(pairs),
        val_score=estimate([a.val_score - b.val_score for a, b in pairs]) if pairs else None,
        test_score=estimate([a.test_score - b.test_score for a, b in pairs]) if pairs else None,
        unpaired=unpaired,
    )


def _key(row: EpisodeRow) -> EpisodeKey:
    return EpisodeKey(row.env, row.episode, row.attempt)


def _difference_of_origin(run: Run, other: Run) -> str | None:
    """What keeps episodes of two runs from beginning alike; None: nothing does."""
    origins = (
        ("tasks", run.row.task, other.row.task),
        ("data", run.row.data_hash[:8], other.row.data_hash[:8]),
        ("rng seeds", run.row.rng_seed, other.row.rng_seed),
        ("horizons", run.row.horizon, other.row.horizon),
    )
    for name, ours, theirs in origins:
        if ours != theirs:
            return f"their {name} differ: {ours} here, {theirs} there"
    return None
