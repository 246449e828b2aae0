"""Result of a run, and its comparison with other runs by score, cost and settings.

The result of a run is the mean of its finished episodes. The result of a training is the mean over episodes
of the last iteration that reached their horizon, because their actions come from the final policy.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from esper.karn.metric import Metric, metric_of
from esper.karn.notation import UNKNOWN, difference
from esper.karn.questions.episode_selection import LAST_ITERATION, LASTED, EpisodeKey, final_episodes
from esper.karn.run import Run
from esper.karn.statistics import Estimate, estimate
from esper.karn.summary import charged_flops
from esper.leyline.rows import EpisodeRow, RunRow, UpdateRow


class Result(NamedTuple):
    """Result of a run: means over finished episodes with confidence intervals."""

    episodes: int
    twin_score: Estimate | None
    """Mean score of the twins; None if no episode has a twin."""
    lead: Estimate | None
    """Validation score minus the twin's validation score, paired by episode."""
    flops: Estimate
    """Mean FLOPs of an episode that count against the budget, without validations."""
    metric: Metric
    validation: Estimate | None
    """Validation value of the run's metric; None if unknown."""
    test_score: Estimate | None
    params: Estimate
    host_params: Estimate
    flops_per_sample: Estimate
    host_flops_per_sample: Estimate
    seconds: Estimate


AVERAGED: Final = ("params", "host_params", "flops_per_sample", "host_flops_per_sample", "seconds")
"""Columns of an episode row whose means have the same names in a result."""


class Comparison(NamedTuple):
    """Comparison with another run, over the episodes that both runs started from the same random streams."""

    run: Run
    result: Result | None
    """Result of the other run; None if it has no finished episode."""
    pairs: int
    validation: Estimate | None
    """Lead of the first run over the other run, paired by episode; None without pairs of episodes."""
    test_score: Estimate | None
    unpaired: str | None
    """Reason why no episodes of the two runs can be paired."""


def final_rows(run: Run) -> list[EpisodeRow]:
    """Return the episodes whose means are the result of the run."""
    return run.rows(EpisodeRow, final_episodes(run))


def episodes_of_iteration(run: Run, number: int) -> list[EpisodeRow]:
    """Return the episodes of an iteration that reached their horizon."""
    return run.rows(EpisodeRow, f"{LASTED} AND iteration = ?", [number])


def broken_episodes(run: Run) -> int:
    """Count the episodes of the last iteration of a training that did not reach their horizon."""
    ((number,),) = run.sql(
        f"SELECT count(*) FROM episode WHERE NOT {LASTED} AND iteration = {LAST_ITERATION}"
    ).fetchall()
    return int(number)


def result(run: Run, rows: Sequence[EpisodeRow] | None = None) -> Result | None:
    """Return the result over the episode rows ``rows``, by default those that count for the result; None
    without rows.
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
    """Estimate the mean of the known values; None if no value is known."""
    known = [value for value in values if value is not None]
    return estimate(known) if known else None


def best_evaluation(run: Run) -> UpdateRow | None:
    """Return the iteration with the highest evaluation return; None if there was no evaluation."""
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
    """Return the settings that differ between runs, by key; ``UNKNOWN`` for a run without the key."""
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
    """Yield a setting, or all nested settings with their keys joined by dots."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from flat(f"{key}.{name}", inner)
    else:
        yield key, value
