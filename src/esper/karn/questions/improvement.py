"""Is the controller improving: what its lives were paid in every round, and what its argmax scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from esper.karn.questions.lives import IN_A_COMPLETE_ROUND
from esper.karn.questions.places import Place, axis_of
from esper.karn.run import Run

NO_REFERENCES: Final[Mapping[str, float]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ImprovementPoint:
    """One round, or neighbouring ones; None is unknown."""

    place: Place
    quarter: float | None
    median: float | None
    three_quarters: float | None
    """Of the returns of the lives of these rounds."""
    score: float | None
    """Mean validation score of the same lives."""
    evaluation_return: float | None
    evaluation_score: float | None
    """Of argmax lives on selection rng seeds, where these rounds were evaluated."""


@dataclass(frozen=True, slots=True)
class Improvement:
    """The rounds of a training."""

    rounds: int
    points: tuple[ImprovementPoint, ...]
    references: Mapping[str, float]
    """Scores of other decision makers, by name."""


def improvement(run: Run, references: Mapping[str, float] = NO_REFERENCES) -> Improvement | None:
    """Of a training, beside scores of others; None: nothing was trained yet."""
    axis = axis_of(run, None)
    if axis.name != "round":
        return None
    found = run.sql(
        f"""
        WITH paid AS (
            SELECT {axis.group(axis.place())} AS together, quantile_cont(total_reward, 0.25) AS quarter,
                   median(total_reward) AS middle, quantile_cont(total_reward, 0.75) AS three_quarters
            FROM episode WHERE {IN_A_COMPLETE_ROUND} GROUP BY together),
        learned AS (
            SELECT {axis.group("round")} AS together, min(round) AS first, max(round) AS last,
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
