"""Final scores and costs of a run, its comparison with other runs by score, cost and settings, and the chart
of scores against costs.

The result of a run consists of means over its finished episodes. The result of a policy training consists of
means over the episodes of the last iteration that reached their horizon, because these episodes used the
latest policy.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, Final, NamedTuple

from markupsafe import Markup

from esper.karn import notation
from esper.karn.drawing import svg
from esper.karn.drawing.axes import TOP
from esper.karn.drawing.curves import FOOT, Curve, curve_panel
from esper.karn.drawing.picture import Picture
from esper.karn.metric import Metric, metric_of
from esper.karn.questions.episode_selection import LAST_ITERATION, LASTED, EpisodeKey
from esper.karn.run import Run
from esper.karn.seed_histories import HORIZON
from esper.karn.statistics import Estimate, estimate
from esper.karn.stored_rows import StoredRows
from esper.karn.summary import charged_flops
from esper.leyline.rows import EpisodeRow, RunRow, UpdateRow

_PANEL: Final = 170.0
_STEP: Final = _PANEL + FOOT + TOP
"""Vertical distance between the tops of two neighbouring panels of the chart."""


class Result(NamedTuple):
    """Final scores and costs of a run: means over finished episodes with confidence intervals."""

    metric: Metric
    rows: Sequence[EpisodeRow]
    """Rows of the finished episodes; there is at least one."""

    def estimate(self, column: str) -> Estimate | None:
        """Return the mean of a column of the episode rows; None if all its values are unknown."""
        return _estimate(getattr(row, column) for row in self.rows)

    def mean(self, column: str) -> float:
        """Return the mean of a column whose values are always known, such as ``params``."""
        return fmean(getattr(row, column) for row in self.rows)

    @property
    def validation(self) -> Estimate | None:
        """Mean validation value of the run's metric (score or loss); None if unknown."""
        return self.estimate(self.metric.column)

    @property
    def lead(self) -> Estimate | None:
        """Difference of the score from the twin's, paired by episode; positive for an improvement."""
        column = self.metric.column
        return _estimate(self.metric.lead(getattr(row, column), row.twin_val_score) for row in self.rows)

    @property
    def flops(self) -> float:
        """Mean FLOPs of an episode that count against the budget; validation after each epoch does not."""
        return fmean(charged_flops(row.flops) for row in self.rows)


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


def broken_episodes(run: Run) -> int:
    """Count the episodes of the last iteration of a training that did not reach their horizon."""
    return len(run.rows(EpisodeRow, f"NOT {LASTED} AND iteration = {LAST_ITERATION}"))


def result(run: Run, rows: Sequence[EpisodeRow] | None = None) -> Result | None:
    """Return final scores and costs, averaged over ``rows`` (by default the ``final_rows`` of the run); None
    if there are no rows.
    """
    rows = final_rows(run) if rows is None else rows
    return Result(metric_of(run.row), rows) if rows else None


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
        test_score=_estimate(notation.difference(a.test_score, b.test_score) for a, b in pairs),
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


# --- chart of scores against costs --------------------------------------------------------------------


def verdict(runs: Mapping[str, Run]) -> dict[str, Result]:
    """Return final scores and costs of the runs that have a finished episode. A run is omitted if its metric
    differs from that of the first run with a finished episode.
    """
    found = {name: one for name, run in runs.items() if (one := result(run)) is not None}
    metric = next((one.metric for one in found.values()), None)
    return {name: one for name, one in found.items() if one.metric is metric and one.validation is not None}


def verdict_picture(runs: Mapping[str, Run]) -> Picture | None:
    """Draw the final scores of several runs against parameters and compute; None if no run has a finished
    episode. The table of compared runs on a page has the numbers.
    """
    arms = verdict(runs)
    if not arms:
        return None
    metric = next(iter(arms.values())).metric
    tested = {name: arm.estimate("test_score") for name, arm in arms.items()}
    is_tested = None not in tested.values()
    which = "Test score" if is_tested else f"Validation {metric.name}"
    found = tested if is_tested else {name: arm.validation for name, arm in arms.items()}
    reached = {name: value for name, value in found.items() if value is not None}

    def panel(axis: str, costs: Sequence[float], text: Callable[[float], str], top: float) -> Markup:
        pairs = zip(reached.items(), costs, strict=True)
        curves = [curve for (name, value), cost in pairs for curve in _curves(name, value, cost, metric)]
        return curve_panel(axis, {cost: text(cost) for cost in costs}, curves, top, _PANEL)

    return Picture(
        svg=svg.drawing(
            2 * _STEP,
            f"{metric.name.capitalize()} against parameters and compute",
            "; ".join(f"{name} {metric.estimate(value)}" for name, value in reached.items()),
            panel("parameters", [arm.mean("params") for arm in arms.values()], notation.count, TOP),
            panel("compute of an episode", [arm.flops for arm in arms.values()], notation.flop, TOP + _STEP),
        ),
        columns=[],
        rows=[],
        caption=f"{which} of the committed networks, with 95 % intervals where there are several episodes.",
    )


def _curves(name: str, reached: Estimate, cost: float, metric: Metric) -> list[Curve]:
    """Return the dot of a run at its cost and score, and the confidence interval of the score as a vertical
    line.
    """
    low, high = (min(max(end, 0.0), metric.most or math.inf) for end in reached.interval)
    interval = Curve("", [(cost, low), (cost, high)] if high > low else [], "thin")
    label = f"{svg.shorten(name, 12)} {metric.text(reached.mean)}"
    return [interval, Curve(label, [(cost, reached.mean)], "dots")]


# --- settings ---------------------------------------------------------------------------------------


def differences(runs: Mapping[str, Run]) -> dict[str, tuple[Any, ...]]:
    """Return the settings that differ between runs, by key; the value is ``UNKNOWN`` for a run that lacks the
    key.
    """
    described = [dict(_described(run.row)) for run in runs.values()]
    keys = dict.fromkeys(key for one in described for key in one)
    found = {key: tuple(one.get(key, notation.UNKNOWN) for one in described) for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def _described(row: RunRow) -> Iterator[tuple[str, Any]]:
    names = ("task", "controller", "rng_seed", "data_hash", "git_revision", "host_params", "horizon", "envs")
    for name in (*names, "config", "versions", "hardware"):
        yield from flat(name, getattr(row, name))


def flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a setting with its key, or all nested settings with their keys joined by dots."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from flat(f"{key}.{name}", inner)
    else:
        yield key, value
