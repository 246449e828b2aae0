"""Does growth pay: scores of all lives beside those of their do-nothing twins, and what they grew to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from esper.karn.questions.lives import ROUND, LifeKey, is_training
from esper.karn.run import Run

MOST_POINTS: Final = 200
"""Points of one line; of longer runs, neighbours are taken together."""


@dataclass(frozen=True, slots=True)
class GrowthPoint:
    """The lives at one epoch, or of one or several neighbouring rounds."""

    first: int
    last: int
    """Epochs or rounds that were taken together; equal where none were."""
    lives: int
    low: float
    quarter: float
    median: float
    three_quarters: float
    high: float
    twin: float | None
    """Median of the twins' scores; None: no twin is known."""
    params: float
    """Median of the parameters of host and seeds together."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Scores over the epochs of lives, or over the rounds of a training."""

    axis: Literal["epoch", "round"]
    end: int
    """Where the axis ends: the horizon, or the planned number of rounds."""
    host_params: int
    points: tuple[GrowthPoint, ...]


def growth(run: Run, life: LifeKey | None = None) -> Growth | None:
    """Of one life or, without one, of the whole run; None: no score is known."""
    row = run.row
    if life is None and is_training(run):
        return _growth(run, "round", row.rounds or 0, "episode", "true", [])
    condition, parameters = ("true", []) if life is None else ("env = ? AND episode = ?", [*life])
    return _growth(run, "epoch", row.horizon, "epoch", condition, parameters)


def _growth(
    run: Run,
    axis: Literal["epoch", "round"],
    end: int,
    table: str,
    condition: str,
    parameters: list[int],
) -> Growth | None:
    place, twin = (ROUND, "twin_val_score") if axis == "round" else ("epoch", "twin_score")
    together = bin_size(end)
    found = run.sql(
        f"""
        SELECT min({place}), max({place}), count(*), min(val_score), quantile_cont(val_score, 0.25),
               median(val_score), quantile_cont(val_score, 0.75), max(val_score), median({twin}),
               median(params)
        FROM {table} WHERE {condition} GROUP BY ({place} - 1) // {together} ORDER BY 1
        """,
        parameters,
    ).fetchall()
    if not found:
        return None
    points = tuple(GrowthPoint(*values) for values in found)
    return Growth(axis=axis, end=max(end, points[-1].last), host_params=run.row.host_params, points=points)


def bin_size(length: int) -> int:
    """How many neighbours are taken together so that a line of this length has few enough points."""
    return max(math.ceil(length / MOST_POINTS), 1)
