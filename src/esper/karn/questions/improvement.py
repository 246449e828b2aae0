"""Is the controller improving: the returns of every iteration, and the scores of its argmax episodes.

The picture: returns above, scores below.
"""

from __future__ import annotations

from dataclasses import dataclass

from esper.karn import notation
from esper.karn.drawing.chart import Chart, Line, Panel, draw
from esper.karn.drawing.picture import Picture
from esper.karn.questions.episodes import IN_A_COMPLETE_ITERATION, EpisodeKey
from esper.karn.questions.places import Place, axis_of
from esper.karn.run import Run


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


def improvement(run: Run, episode: EpisodeKey | None = None) -> Improvement | None:
    """Of a whole training, whichever episode is shown; None: there was no update yet."""
    axis = axis_of(run, None)
    if axis.name != "iteration":
        return None
    found = run.sql(
        f"""
        WITH rewarded AS (
            SELECT {axis.group(axis.place())} AS together, quantile_cont(total_reward, 0.25) AS quarter,
                   median(total_reward) AS middle, quantile_cont(total_reward, 0.75) AS three_quarters
            FROM episode WHERE {IN_A_COMPLETE_ITERATION} GROUP BY together),
        learned AS (
            SELECT {axis.group("iteration")} AS together, min(iteration) AS first, max(iteration) AS last,
                   avg(val_score) AS score, avg(evaluation_return) AS evaluation_return,
                   avg(evaluation_score) AS evaluation_score
            FROM update GROUP BY together)
        SELECT first, last, quarter, middle, three_quarters, score, evaluation_return, evaluation_score
        FROM learned LEFT JOIN rewarded USING (together) ORDER BY first
        """
    ).fetchall()
    if not found:
        return None
    points = tuple(ImprovementPoint(Place(first, last), *values) for first, last, *values in found)
    return Improvement(max(axis.end, points[-1].place.last), points)


def draw_improvement(found: Improvement, beside: Improvement | None = None) -> Picture:
    """Returns above, scores below."""
    return Picture(
        svg=draw(_chart(found), None if beside is None else _chart(beside)),
        columns=["iteration", "25 %", "median", "75 %", "score", "evaluation return", "evaluation score"],
        rows=[_cells(point) for point in found.points],
        caption="Above: return of an iteration's episodes, median and middle half; below: their mean score."
        " Dots: argmax episodes on selection rng seeds.",
    )


def _chart(found: Improvement) -> Chart:
    points, last = found.points, found.points[-1]
    returns = [
        Line("return", [point.median for point in points], _signed),
        Line("evaluated", [p.evaluation_return for p in points], _signed, "dots", label=""),
    ]
    scores = [
        Line("score", [point.score for point in points], notation.points),
        Line("argmax", [point.evaluation_score for point in points], notation.points, "dots"),
    ]
    band = ([point.quarter for point in points], [point.three_quarters for point in points])
    return Chart(
        title="Return and score per iteration",
        description=f"Median return {_signed(last.median)}, mean score {notation.points(last.score)}"
        f" in iteration {last.place}.",
        axis="iteration",
        end=found.iterations,
        places=[point.place for point in points],
        panels=[
            Panel(130, returns, [band], zero=True),
            Panel(130, scores, near=0.0, most=100.0),
        ],
    )


def _signed(value: float | None) -> str:
    return notation.gain(value, 2)


def _cells(point: ImprovementPoint) -> list[str]:
    returns = (point.quarter, point.median, point.three_quarters)
    return [
        str(point.place),
        *map(_signed, returns),
        notation.points(point.score),
        _signed(point.evaluation_return),
        notation.points(point.evaluation_score),
    ]
