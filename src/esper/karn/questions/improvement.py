"""Is the controller improving: the returns of every iteration, and the scores of its argmax episodes.

The picture: returns above, scores below.
"""

from functools import partial
from typing import Final

from esper.karn import notation
from esper.karn.drawing.chart import Chart, ChartLine, Panel, draw
from esper.karn.drawing.picture import Picture, series_table
from esper.karn.questions.episode_selection import is_training
from esper.karn.questions.series import Series, query_series
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


def improvement(run: Run) -> Series | None:
    """Of a training; None: there was no update yet."""
    return query_series(run, _TABLE, _COLUMNS) if is_training(run) else None


def draw_improvement(found: Series, beside: Series | None = None) -> Picture:
    scores = {"score": notation.points, "evaluation score": notation.points}
    return Picture(
        draw(_chart, found, beside),
        *series_table(found, _signed, scores),
        "Above: return of an iteration's episodes, median and middle half; below: their mean score."
        " Dots: argmax episodes on selection rng seeds.",
    )


def _chart(found: Series) -> Chart:
    returns = [
        ChartLine("return", found["median"], _signed),
        ChartLine("evaluated", found["evaluation return"], _signed, "dots", label=""),
    ]
    scores = [
        ChartLine("score", found["score"], notation.points),
        ChartLine("argmax", found["evaluation score"], notation.points, "dots"),
    ]
    return Chart(
        title="Return and score per iteration",
        description=f"Median return {_signed(found.last('median'))}, mean score"
        f" {notation.points(found.last('score'))} in iteration {found.bins[-1]}.",
        found=found,
        panels=[
            Panel(130, returns, [(found["25 %"], found["75 %"])], zero=True),
            Panel(130, scores, near=0.0, most=100.0),
        ],
    )
