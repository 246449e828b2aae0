"""Chart of the scores of several runs against their parameters and compute."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from markupsafe import Markup

from esper.karn import notation
from esper.karn.drawing import svg
from esper.karn.drawing.axes import TOP
from esper.karn.drawing.curves import FOOT, Curve, curve_panel
from esper.karn.drawing.picture import Picture
from esper.karn.metric import SCORE, Metric
from esper.karn.run import Run
from esper.karn.run_result import Result, result
from esper.karn.statistics import Estimate

Arms = Mapping[str, Result]
"""Final scores and costs of the compared runs, by name of the run."""
_PANEL: Final = 170.0
_STEP: Final = _PANEL + FOOT + TOP
"""Vertical distance between the tops of two neighbouring panels of the chart."""


def verdict(runs: Mapping[str, Run]) -> Arms:
    """Return final scores and costs of the runs that have a finished episode. A run is omitted if its metric
    differs from that of the first run with a finished episode.
    """
    found = {name: one for name, run in runs.items() if (one := result(run)) is not None}
    metric = next((one.metric for one in found.values()), None)
    return {name: one for name, one in found.items() if one.metric is metric and one.validation is not None}


def verdict_picture(runs: Mapping[str, Run]) -> Picture | None:
    """Draw the final scores of several runs against parameters and compute; None if no run has a finished
    episode.
    """
    arms = verdict(runs)
    if not arms:
        return None
    metric = next(iter(arms.values())).metric
    tested = {name: arm.estimate("test_score") for name, arm in arms.items()}
    is_tested = None not in tested.values()
    which = "Test score" if is_tested else f"Validation {metric.name}"
    found = tested if is_tested else {name: arm.validation for name, arm in arms.items()}
    reached = {name: value for name, value in found.items() if value is not None}

    def panel(axis: str, costs: Sequence[float], text: Callable[[float], str], top: float) -> Markup:
        pairs = zip(reached.items(), costs, strict=True)
        curves = [curve for (name, value), cost in pairs for curve in _curves(name, value, cost, metric)]
        return curve_panel(axis, {cost: text(cost) for cost in costs}, curves, top, _PANEL)

    params = [arm.mean("params") for arm in arms.values()]
    flops = [arm.flops for arm in arms.values()]
    return Picture(
        svg=svg.drawing(
            2 * _STEP,
            f"{metric.name.capitalize()} against parameters and compute",
            "; ".join(f"{name} {metric.estimate(value)}" for name, value in reached.items()),
            panel("parameters", params, notation.count, TOP),
            panel("compute of an episode", flops, notation.flop, TOP + _STEP),
        ),
        columns=["arm", "episodes", "test", "validation", "parameters", "compute of an episode", "inference"],
        rows=[
            [
                name,
                notation.count(len(arm.rows)),
                SCORE.estimate(tested[name]),
                metric.estimate(arm.validation),
                notation.count(arm.mean("params")),
                notation.flop(arm.flops),
                notation.flop(arm.mean("flops_per_sample")),
            ]
            for name, arm in arms.items()
        ],
        caption=f"{which} of the committed networks, with 95 % intervals where there are several episodes.",
    )


def _curves(name: str, reached: Estimate, cost: float, metric: Metric) -> list[Curve]:
    """Return the dot of a run at its cost and score, and the confidence interval of the score as a vertical
    line.
    """
    low, high = (min(max(end, 0.0), metric.most or math.inf) for end in reached.interval)
    interval = Curve("", [(cost, low), (cost, high)] if high > low else [], "thin")
    label = f"{svg.shorten(name, 12)} {metric.text(reached.mean)}"
    return [interval, Curve(label, [(cost, reached.mean)], "dots")]
