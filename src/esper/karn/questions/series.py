"""Series of numbers over the axis of a run: epochs of its episodes, or iterations of a training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from esper.karn.metric import SCORE, Metric, metric_of
from esper.karn.run import Run

AxisName = Literal["epoch", "iteration"]
Values = Sequence[float | None]
"""Numbers of a series, one per axis bin (epochs or iterations); None is unknown."""
MOST_POINTS: Final = 200
"""Largest number of points of a line; on a longer axis, neighbouring epochs or iterations are merged into
bins.
"""


class AxisBin(NamedTuple):
    """Axis bin: one epoch or iteration, or several merged epochs or iterations."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}–{self.last}"


class Axis(NamedTuple):
    """Horizontal axis of a run's charts: epochs or iterations."""

    name: AxisName
    end: int
    """Planned number of iterations or epochs; 0 if unknown."""

    @property
    def bin_size(self) -> int:
        """Number of epochs or iterations per axis bin, so that the axis has at most ``MOST_POINTS`` bins."""
        return max(math.ceil(self.end / MOST_POINTS), 1)


def axis_of(run: Run) -> Axis:
    """Return the axis of a run: iterations for a training, else epochs."""
    if run.is_training:
        return Axis("iteration", run.row.iterations or 0)
    return Axis("epoch", run.row.horizon or 0)


@dataclass(frozen=True, slots=True)
class Series:
    """Named series of numbers over the same axis bins."""

    axis: AxisName
    end: int
    """Last position on the horizontal axis: the horizon, or the planned number of iterations."""
    bins: tuple[AxisBin, ...]
    values: Mapping[str, Values]
    metric: Metric = SCORE
    """Metric of the run: score or loss."""

    def __getitem__(self, name: str) -> Values:
        return self.values[name]

    def last(self, name: str) -> float | None:
        return self.values[name][-1]


def query_series(
    run: Run,
    table: str,
    columns: Mapping[str, str],
    *,
    position: str | None = None,
    parameters: Sequence[object] = (),
    joined: bool = True,
) -> Series | None:
    """Aggregate the rows of a telemetry table per axis bin (epochs or iterations); None if there are no rows.

    Args:
        run: Run whose rows are aggregated.
        table: SQL after ``FROM``: telemetry table or join of tables, with ``WHERE`` for a part of the rows.
        columns: SQL aggregates, such as "avg(val_score)", by name of the series.
        position: SQL for the position of a row on the axis; by default the column ``epoch`` or ``iteration``.
        parameters: Values for the ``?`` in ``columns`` and ``table``.
        joined: Whether neighbouring epochs or iterations are merged into bins if the axis is long.
    """
    axis = axis_of(run)
    at = position or axis.name
    together = f"(({at}) - 1) // {axis.bin_size}" if joined else at
    found = run.fetch(
        f"SELECT min({at}), max({at}), {', '.join(columns.values())} FROM {table}"
        f" GROUP BY {together} ORDER BY 1",
        parameters,
    )
    if not found:
        return None
    firsts, lasts, *values = zip(*found, strict=True)
    bins = tuple(map(AxisBin, firsts, lasts))
    named = dict(zip(columns, values, strict=True))
    return Series(axis.name, max(axis.end, lasts[-1]), bins, named, metric_of(run.row))
