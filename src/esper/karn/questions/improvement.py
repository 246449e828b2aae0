"""Is the controller improving: the returns of every iteration, and the scores of its argmax episodes.

The picture: returns above, scores below.
"""

from functools import partial
from typing import Final

from esper.karn import notation
from esper.karn.drawing.chart import Chart, Line, Panel, draw
from esper.karn.drawing.picture import Picture, course_table
from esper.karn.questions.episodes import is_training
from esper.karn.questions.places import Courses, courses
from esper.karn.run import Run

_TABLE: Final = (
    "update LEFT JOIN (SELECT iteration, list(total_reward) AS returns FROM episode GROUP BY iteration)"
    " USING (iteration)"
)
_QUANTILE: Final = "list_aggregate(flatten(list(returns)), 'quantile_cont', {})"
_COLUMNS: Final = {
    "25 %": _QUANTILE.format(0.25),
    "median": _QUANTILE.format(0.5),
    "75 %": _QUANTILE.format(0.75),
    "score": "avg(val_score)",
    "evaluation return": "avg(evaluation_return)",
    "evaluation score": "avg(evaluation_score)",
}
"""Quartiles are of the returns of all episodes; evaluations are argmax episodes on selection rng seeds."""
_signed = partial(notation.gain, decimals=2)


def improvement(run: Run) -> Courses | None:
    """Of a training; None: there was no update yet."""
    return courses(run, _TABLE, _COLUMNS) if is_training(run) else None


def draw_improvement(found: Courses, beside: Courses | None = None) -> Picture:
    scores = {"score": notation.points, "evaluation score": notation.points}
    return Picture(
        draw(_chart, found, beside),
        *course_table(found, _signed, scores),
        "Above: return of an iteration's episodes, median and middle half; below: their mean score."
        " Dots: argmax episodes on selection rng seeds.",
    )


def _chart(found: Courses) -> Chart:
    returns = [
        Line("return", found["median"], _signed),
        Line("evaluated", found["evaluation return"], _signed, "dots", label=""),
    ]
    scores = [
        Line("score", found["score"], notation.points),
        Line("argmax", found["evaluation score"], notation.points, "dots"),
    ]
    return Chart(
        title="Return and score per iteration",
        description=f"Median return {_signed(found.last('median'))}, mean score"
        f" {notation.points(found.last('score'))} in iteration {found.places[-1]}.",
        found=found,
        panels=[
            Panel(130, returns, [(found["25 %"], found["75 %"])], zero=True),
            Panel(130, scores, near=0.0, most=100.0),
        ],
    )
