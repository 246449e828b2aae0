"""Is the controller improving: what its episodes were paid in every iteration, and what its argmax scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from esper.karn.questions.episodes import IN_A_COMPLETE_ITERATION
from esper.karn.questions.places import Place, axis_of
from esper.karn.run import Run

NO_REFERENCES: Final[Mapping[str, float]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ImprovementPoint:
    """One iteration, or neighbouring ones; None is unknown."""

    place: Place
    quarter: float | None
    median: float | None
    three_quarters: float | None
    """Of the returns of the episodes of these iterations."""
    score: float | None
    """Mean validation score of the same episodes."""
    evaluation_return: float | None
    evaluation_score: float | None
    """Of argmax episodes on selection rng seeds, where these iterations were evaluated."""


@dataclass(frozen=True, slots=True)
class Improvement:
    """The iterations of a training."""

    iterations: int
    points: tuple[ImprovementPoint, ...]
    references: Mapping[str, float]
    """Scores of other decision makers, by name."""


def improvement(run: Run, references: Mapping[str, float] = NO_REFERENCES) -> Improvement | None:
    """Of a training, beside scores of others; None: nothing was trained yet."""
    axis = axis_of(run, None)
    if axis.name != "iteration":
        return None
    found = run.sql(
        f"""
        WITH paid AS (
            SELECT {axis.group(axis.place())} AS together, quantile_cont(total_reward, 0.25) AS quarter,
                   median(total_reward) AS middle, quantile_cont(total_reward, 0.75) AS three_quarters
            FROM episode WHERE {IN_A_COMPLETE_ITERATION} GROUP BY together),
        learned AS (
            SELECT {axis.group("iteration")} AS together, min(iteration) AS first, max(iteration) AS last,
                   avg(val_score) AS score, avg(evaluation_return) AS evaluation_return,
                   avg(evaluation_score) AS evaluation_score
            FROM update GROUP BY together)
        SELECT first, last, quarter, middle, three_quarters, score, evaluation_return, evaluation_score
        FROM learned LEFT JOIN paid USING (together) ORDER BY first
        """
    ).fetchall()
    if not found:
        return None
    points = tuple(ImprovementPoint(Place(first, last), *values) for first, last, *values in found)
    return Improvement(max(axis.end, points[-1].place.last), points, dict(references))
