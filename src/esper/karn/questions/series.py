"""Numbers over a run's axis: epochs of its episodes, or iterations of a training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from esper.karn.metric import SCORE, Metric, metric_of
from esper.karn.questions.episode_selection import is_training
from esper.karn.run import Run

AxisName = Literal["epoch", "iteration"]
Values = Sequence[float | None]
"""One per place; None is unknown."""
MOST_POINTS: Final = 200
"""Points of one line; of longer runs, neighbours are taken together."""


class AxisBin(NamedTuple):
    """One epoch or iteration, or several that were taken together."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}–{self.last}"


class Axis(NamedTuple):
    """What a question about a run is asked over."""

    name: AxisName
    end: int
    """The planned number of iterations or epochs; 0: unknown."""

    @property
    def bin_size(self) -> int:
        """How many neighbours are taken together so that a line has few enough points."""
        return max(math.ceil(self.end / MOST_POINTS), 1)


def axis_of(run: Run) -> Axis:
    """Iterations of a training, epochs of the episodes of any other run."""
    if is_training(run):
        return Axis("iteration", run.row.iterations or 0)
    return Axis("epoch", run.row.horizon or 0)


@dataclass(frozen=True, slots=True)
class Series:
    """Numbers by their names, over the same places."""

    axis: AxisName
    end: int
    """Where the axis ends: the horizon, or the planned number of iterations."""
    bins: tuple[AxisBin, ...]
    values: Mapping[str, Values]
    metric: Metric = SCORE
    """What the run is decided by."""

    def __getitem__(self, name: str) -> Values:
        return self.values[name]

    def last(self, name: str) -> float | None:
        return self.values[name][-1]


def query_series(
    run: Run,
    table: str,
    columns: Mapping[str, str],
    *,
    where: str = "true",
    place: str | None = None,
    parameters: Sequence[object] = (),
    joined: bool = True,
) -> Series | None:
    """``columns``, SQL over the rows at one place, by name; None: there are no such rows.

    ``place`` is SQL too, the column of the axis' name unless given. ``joined``: neighbours of a long axis
    are one place.
    """
    axis = axis_of(run)
    at = place or axis.name
    together = f"(({at}) - 1) // {axis.bin_size}" if joined else at
    found = run.sql(
        f"SELECT min({at}), max({at}), {', '.join(columns.values())} FROM {table} WHERE {where}"
        f" GROUP BY {together} ORDER BY 1",
        parameters,
    ).fetchall()
    if not found:
        return None
    firsts, lasts, *values = zip(*found, strict=True)
    places = tuple(map(AxisBin, firsts, lasts))
    named = dict(zip(columns, values, strict=True))
    return Series(axis.name, max(axis.end, lasts[-1]), places, named, metric_of(run.row))
