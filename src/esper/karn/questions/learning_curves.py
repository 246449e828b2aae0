"""Learning curves: scores and parameters of hosts, with scores of their twins without growth, and returns of
a policy training by iteration.
"""

from dataclasses import replace
from functools import partial
from typing import Final

from esper.karn import notation
from esper.karn.drawing.chart import Chart, ChartData, Panel
from esper.karn.drawing.picture import series_table
from esper.karn.metric import metric_of
from esper.karn.questions.episode_selection import IN_A_COMPLETE_ITERATION, LASTED
from esper.karn.questions.series import Series, query_series
from esper.karn.run import Run


def growth(run: Run, *, joined: bool = True) -> Series | None:
    """Return quantiles of the scores and means of the scores, twins' scores and parameters, by epoch or
    iteration; None if the run has no rows.

    Args:
        run: Run to read; means of a training are over the episodes that reached their horizon.
        joined: Whether neighbouring epochs or iterations are merged into bins if the axis is long.
    """
    metric = metric_of(run.row).column
    table, twin, averaged = "epoch", "twin_score", "true"
    if run.is_training:
        table, twin, averaged = f"episode WHERE {IN_A_COMPLETE_ITERATION}", "twin_val_score", LASTED
    means = {"score": metric, "twin": twin, "parameters": "params"}
    columns = {
        "episodes": "count(DISTINCT (env, episode, attempt))",
        "lowest": f"min({metric})",
        "25 %": f"quantile_cont({metric}, 0.25)",
        "median": f"median({metric})",
        "75 %": f"quantile_cont({metric}, 0.75)",
        "highest": f"max({metric})",
        **{name: f"avg({column}) FILTER (WHERE {averaged})" for name, column in means.items()},
    }
    return query_series(run, table, columns, joined=joined)


def growth_chart(found: Series) -> Chart:
    """Return the chart of scores with quantile bands and the twin's score, and of the parameters in a panel
    below.
    """
    size = f"{notation.count(found.last('parameters'))} params"
    params = ChartData("parameters", found["parameters"], notation.count, "steps", label=size)
    bands = [(found["lowest"], found["highest"]), (found["25 %"], found["75 %"])]
    metric = found.metric
    named = {metric.name if name == "score" else name: course for name, course in found.values.items()}
    texts = {"episodes": notation.count, "parameters": notation.count}
    scores = [
        ChartData("twin", found["twin"], metric.text, "twin"),
        ChartData(metric.name, found["score"], metric.text),
    ]
    name = metric.name.capitalize()
    return Chart(
        title=f"{name} and parameters",
        description=f"{name} {metric.text(found.last('score'))} and twin"
        f" {metric.text(found.last('twin'))} at {found.axis} {found.bins[-1]}, with"
        f" {notation.count(found.last('parameters'))} parameters.",
        found=found,
        panels=[
            Panel(170, scores, bands if _has_fan(found) else (), near=0.0, most=metric.most),
            Panel(60, [params], zero=True, ticks=2),
        ],
        table=series_table(replace(found, values=named), metric.text, texts),
        caption=_growth_caption(found),
        room=124,
    )


def _has_fan(found: Series) -> bool:
    return found["lowest"] != found["highest"]


def _growth_caption(found: Series) -> str:
    metric = found.metric
    score, twin, params = (found.last(name) for name in ("score", "twin", "parameters"))
    fan = ""
    if _has_fan(found):
        which = " of those that lasted" if found.axis == "iteration" else ""
        fan = f"Bands: all episodes, and their middle half; line: the mean{which}. "
    lead, against = metric.lead(score, twin), ""
    if lead is not None:
        fan += "Dotted: the do-nothing twin. "
        against = f" {metric.gain(lead)}{metric.unit} over the twin,"
    return (
        f"{fan}At {found.axis} {found.bins[-1]} the {metric.name} is {metric.text(score)},{against}"
        f" with {notation.count(params)} parameters."
    )


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
"""SQL expression of each learning curve of a policy training. Quartiles of returns are over all episodes of
an iteration; evaluations are episodes with argmax actions on selection rng seeds.
"""
_signed = partial(notation.gain, decimals=2)


def improvement(run: Run) -> Series | None:
    """Return the episode returns and scores of a policy training by iteration; None for other runs and before
    the first update.
    """
    return query_series(run, _TABLE, _COLUMNS) if run.is_training else None


def improvement_chart(found: Series) -> Chart:
    """Return the chart of the episode returns of a training with quartiles, and of the scores in a panel
    below.
    """
    texts = {"score": notation.points, "evaluation score": notation.points}
    returns = [
        ChartData("return", found["median"], _signed),
        ChartData("evaluated", found["evaluation return"], _signed, "dots", label=""),
    ]
    scores = [
        ChartData("score", found["score"], notation.points),
        ChartData("argmax", found["evaluation score"], notation.points, "dots"),
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
        table=series_table(found, _signed, texts),
        caption="Above: return of an iteration's episodes, median and middle half; below: their mean score."
        " Dots: argmax episodes on selection rng seeds.",
    )
