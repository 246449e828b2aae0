"""Is PPO healthy: the metrics of every update that have a healthy band, and the policy's entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from esper.karn.questions.places import Place, axis_of
from esper.karn.run import Run
from esper.leyline.columns import COLUMNS, ColumnSpec

BESIDE: Final = ("entropy", "value_loss")
"""Shown too although they have no band."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric over the iterations."""

    name: str
    unit: str
    meaning: str
    low: float | None
    high: float | None
    """Edges of the healthy band; None: open."""
    values: tuple[float | None, ...]
    """Per place; of iterations that were taken together the least healthy, or the mean without a band."""

    def is_outside(self, value: float | None) -> bool:
        """Whether a value has left the band; what is unknown has not."""
        if value is None:
            return False
        return (self.low is not None and value < self.low) or (self.high is not None and value > self.high)


@dataclass(frozen=True, slots=True)
class Health:
    """All metrics over the same iterations."""

    iterations: int
    places: tuple[Place, ...]
    metrics: tuple[Metric, ...]


def health(run: Run) -> Health | None:
    """Of a training; None: there was no update yet."""
    axis = axis_of(run, None)
    columns = [column for column in COLUMNS["update"] if _is_shown(column)]
    chosen = ", ".join(_worst(column) for column in columns)
    found = run.sql(
        f"SELECT min(iteration), max(iteration), {chosen} FROM update GROUP BY {axis.group('iteration')} ORDER BY 1"
    ).fetchall()
    if not found:
        return None
    places = tuple(Place(first, last) for first, last, *_ in found)
    return Health(
        iterations=max(axis.end, places[-1].last),
        places=places,
        metrics=tuple(
            Metric(
                column.name,
                column.unit,
                column.meaning,
                column.low,
                column.high,
                tuple(None if row[index] is None else float(row[index]) for row in found),
            )
            for index, column in enumerate(columns, start=2)
        ),
    )


def _is_shown(column: ColumnSpec) -> bool:
    is_scalar = column.sql_type in ("DOUBLE", "BIGINT")
    return is_scalar and (column.low is not None or column.high is not None or column.name in BESIDE)


def _worst(column: ColumnSpec) -> str:
    function = "max" if column.high is not None else "min" if column.low is not None else "avg"
    return f"{function}({column.name})"
