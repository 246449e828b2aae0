"""Final scores and costs of a run, and its comparison with other runs by score, cost and settings.

The result of a run consists of means over its finished episodes. The result of a policy training consists of
means over the episodes of the last iteration that reached their horizon, because these episodes used the
latest policy.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from esper.karn.metric import Metric, metric_of
from esper.karn.notation import UNKNOWN, difference
from esper.karn.questions.episode_selection import LAST_ITERATION, LASTED, EpisodeKey
from esper.karn.run import Run
from esper.karn.seed_histories import HORIZON
from esper.karn.statistics import Estimate, estimate
from esper.karn.stored_rows import StoredRows
from esper.karn.summary import charged_flops
from esper.leyline.rows import EpisodeRow, RunRow, UpdateRow


class Result(NamedTuple):
    """Final scores and costs of a run: means over finished episodes with confidence intervals."""

    episodes: int
    twin_score: Estimate | None
    """Mean score of the twins (hosts without growth); None if no episode has a twin."""
    lead: Estimate | None
    """Difference of the validation score from the twin's, paired by episode; positive for an improvement."""
    flops: Estimate
    """Mean FLOPs of an episode that count against the budget; validation after each epoch does not count."""
    metric: Metric
    validation: Estimate | None
    """Mean validation value of the run's metric (score or loss); None if unknown."""
    test_score: Estimate | None
    params: Estimate
    host_params: Estimate
    flops_per_sample: Estimate
    host_flops_per_sample: Estimate
    seconds: Estimate


AVERAGED: Final = ("params", "host_params", "flops_per_sample", "host_flops_per_sample", "seconds")
"""Columns of an episode row whose means are fields of ``Result`` with the same names."""


class Comparison(NamedTuple):
    """Comparison of a run with another run, over the episodes that both runs started from the same random
    streams.
    """

    run: Run
    result: Result | None
    """Final scores and costs of the other run; None if it has no finished episode."""
    pairs: int
    validation: Estimate | None
    """Difference of the validation metric from that of the other run, paired by episode, positive for an
    improvement; None if no episodes can be paired.
    """
    test_score: Estimate | None
    unpaired: str | None
    """Reason why no episodes of the two runs can be paired; None if episodes are paired."""


def final_rows(run: Run, stored: StoredRows | None = None) -> list[EpisodeRow]:
    """Return the episode rows over which the final scores of a run are averaged: all, or those of a
    training's last iteration that reached the horizon.

    Args:
        run: Run to read.
        stored: Rows that were read from the run earlier; they are read now unless given.
    """
    stored = stored or run.look()
    rows = stored.rows(EpisodeRow)
    if not run.is_training:
        return rows
    last = max((update.iteration for update in stored.rows(UpdateRow)), default=0)
    return [row for row in rows if row.ended_by == HORIZON and row.iteration == last]


def episodes_of_iteration(run: Run, number: int) -> list[EpisodeRow]:
    """Return the rows of the episodes of an iteration that reached their horizon."""
    return run.rows(EpisodeRow, f"{LASTED} AND iteration = ?", [number])


def broken_episodes(run: Run) -> int:
    """Count the episodes of the last iteration of a training that did not reach their horizon."""
    ((number,),) = run.fetch(
        f"SELECT count(*) FROM episode WHERE NOT {LASTED} AND iteration = {LAST_ITERATION}"
    )
    return int(number)


def result(run: Run, rows: Sequence[EpisodeRow] | None = None) -> Result | None:
    """Return final scores and costs, averaged over ``rows`` (by default the ``final_rows`` of the run); None
    if there are no rows.
    """
    rows, metric = final_rows(run) if rows is None else rows, metric_of(run.row)
    if not rows:
        return None
    scores = [getattr(row, metric.column) for row in rows]
    twins = [row.twin_val_score for row in rows]
    leads = map(metric.lead, scores, twins)
    return Result(
        episodes=len(rows),
        twin_score=_estimate(twins),
        lead=_estimate(leads),
        flops=estimate([charged_flops(row.flops) for row in rows]),
        metric=metric,
        validation=_estimate(scores),
        test_score=_estimate(row.test_score for row in rows),
        **{name: estimate([getattr(row, name) for row in rows]) for name in AVERAGED},
    )


def _estimate(values: Iterable[float | None]) -> Estimate | None:
    """Return the mean of the known values with its confidence interval; None if no value is known."""
    known = [value for value in values if value is not None]
    return estimate(known) if known else None


def best_evaluation(run: Run) -> UpdateRow | None:
    """Return the update row of the iteration with the highest evaluation return; None if there was no
    evaluation.
    """
    rows = run.rows(UpdateRow, "evaluation_return IS NOT NULL")
    return max(rows, key=lambda row: row.evaluation_return or 0.0, default=None)


def compare(run: Run, other: Run) -> Comparison:
    """Compare two runs over the episodes that started from the same random streams."""
    ours, theirs, metric = final_rows(run), final_rows(other), metric_of(run.row)
    unpaired = _pairing_obstacle(run, other)
    control = {EpisodeKey.of(row): row for row in theirs}
    pairs = [(row, control[key]) for row in ours if (key := EpisodeKey.of(row)) in control]
    if unpaired is not None:
        pairs = []
    elif not pairs:
        unpaired = "they have no finished episode in common"
    return Comparison(
        run=other,
        result=result(other, theirs),
        pairs=len(pairs),
        validation=_estimate(
            metric.lead(getattr(a, metric.column), getattr(b, metric.column)) for a, b in pairs
        ),
        test_score=_estimate(difference(a.test_score, b.test_score) for a, b in pairs),
        unpaired=unpaired,
    )


def _pairing_obstacle(run: Run, other: Run) -> str | None:
    """Return the reason why episodes of two runs cannot be paired; None if they can be paired."""
    origins = (
        ("tasks", run.row.task, other.row.task),
        ("metrics", run.row.metric, other.row.metric),
        ("data", *(None if one.data_hash is None else one.data_hash[:8] for one in (run.row, other.row))),
        ("rng seeds", run.row.rng_seed, other.row.rng_seed),
        ("horizons", run.row.horizon, other.row.horizon),
    )
    for name, ours, theirs in origins:
        if ours is None and name != "horizons":
            return f"their {name} are unknown"
        if ours != theirs:
            return f"their {name} differ: {ours} here, {theirs} there"
    return None


# --- settings ---------------------------------------------------------------------------------------


def differences(runs: Mapping[str, Run]) -> dict[str, tuple[Any, ...]]:
    """Return the settings that differ between runs, by key; the value is ``UNKNOWN`` for a run that lacks the
    key.
    """
    described = [dict(_described(run.row)) for run in runs.values()]
    keys = dict.fromkeys(key for one in described for key in one)
    found = {key: tuple(one.get(key, UNKNOWN) for one in described) for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def _described(row: RunRow) -> Iterator[tuple[str, Any]]:
    names = ("task", "controller", "rng_seed", "data_hash", "git_revision", "host_params", "horizon", "envs")
    yield from ((name, getattr(row, name)) for name in names)
    for name, value in (("config", row.config), ("versions", row.versions), ("hardware", row.hardware)):
        yield from flat(name, value)


def flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a setting with its key, or all nested settings with their keys joined by dots."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from flat(f"{key}.{name}", inner)
    else:
        yield key, value
