"""Score of several runs against their parameters and compute."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from markupsafe import Markup

from esper.karn import notation
from esper.karn.drawing import svg
from esper.karn.drawing.axes import AxisScale, apart, around, value_axis, y_axis
from esper.karn.drawing.picture import Picture
from esper.karn.metric import SCORE, Metric
from esper.karn.run import Run
from esper.karn.run_result import Result, result
from esper.karn.statistics import Estimate

Arms = Mapping[str, Result]
"""Results by run name."""
_LEFT: Final = 48.0
_RIGHT: Final = svg.WIDTH - 26
_PANEL: Final = 170.0
_STEP: Final = 226.0
"""Distance between the tops of two panels."""
_TOP: Final = 14.0


def verdict(runs: Mapping[str, Run]) -> Arms:
    """Return the results of runs with a finished episode and the same metric as the first one, in order."""
    found = {name: one for name, run in runs.items() if (one := result(run)) is not None}
    metric = next((one.metric for one in found.values()), None)
    return {name: one for name, one in found.items() if one.metric is metric and one.validation is not None}


def verdict_picture(runs: Mapping[str, Run]) -> Picture | None:
    """Draw the results of several runs; None if no run has a finished episode."""
    arms = verdict(runs)
    if not arms:
        return None
    metric = next(iter(arms.values())).metric
    is_tested = all(arm.test_score is not None for arm in arms.values())
    which = "Test score" if is_tested else f"Validation {metric.name}"
    of = "test_score" if is_tested else "validation"
    reached: dict[str, Estimate] = {name: getattr(arm, of) for name, arm in arms.items()}
    return Picture(
        svg=svg.drawing(
            2 * _STEP + 4,
            f"{metric.name.capitalize()} against parameters and compute",
            "; ".join(f"{name} {metric.estimate(value)}" for name, value in reached.items()),
            _draw_panel(reached, metric, [arm.params.mean for arm in arms.values()], "parameters", _TOP),
            _draw_panel(
                reached, metric, [arm.flops.mean for arm in arms.values()], "FLOP of an episode", _TOP + _STEP
            ),
        ),
        columns=["arm", "episodes", "test", "validation", "parameters", "compute of an episode", "inference"],
        rows=[
            [
                name,
                notation.count(arm.episodes),
                SCORE.estimate(arm.test_score),
                metric.estimate(arm.validation),
                notation.count(arm.params.mean),
                notation.flop(round(arm.flops.mean)),
                notation.flop(round(arm.flops_per_sample.mean)),
            ]
            for name, arm in arms.items()
        ],
        caption=f"{which} of the committed networks, with 95 % intervals where there are several episodes.",
    )


def _draw_panel(
    reached: Mapping[str, Estimate], metric: Metric, spent: Sequence[float], name: str, top: float
) -> Markup:
    """Draw a dot per run at its score and cost, on a logarithmic axis."""
    most = metric.most or math.inf
    intervals = [[min(max(end, 0.0), most) for end in value.interval] for value in reached.values()]
    low, high = around([end for ends in intervals for end in ends], 4, floor=0.0)
    y = AxisScale(low, min(high, most), top + _PANEL, top)
    costs = [math.log10(max(cost, 1.0)) for cost in spent]
    margin = max(0.08 * (max(costs) - min(costs)), 0.1)
    x = AxisScale(min(costs) - margin, max(costs) + margin, _LEFT, _RIGHT)
    points = [(x(at), y(value.mean)) for at, value in zip(costs, reached.values(), strict=True)]
    spread = zip(points, intervals, strict=True)
    return svg.group(
        y_axis(y, _LEFT, _RIGHT),
        _cost_axis(x, top + _PANEL, name),
        *(svg.line(at, y(low), at, y(high), "thin") for (at, _), (low, high) in spread if high > low),
        svg.path(svg.dots(points), "dot"),
        *_names(reached, metric, points),
    )


def _cost_axis(x: AxisScale, bottom: float, name: str) -> Markup:
    exponents = range(math.floor(x.low), math.ceil(x.high) + 1)
    values = [factor * 10.0**exponent for exponent in exponents for factor in (1, 2, 5)]
    shown = [value for value in values if x.low <= math.log10(value) <= x.high]
    if len(shown) > 7:
        shown = [value for value in shown if math.isclose(math.log10(value) % 1, 0, abs_tol=1e-9)]
    return value_axis(x, bottom, name, {math.log10(value): short_count(value) for value in shown})


def short_count(value: float) -> str:
    """Format a round number with an SI prefix."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _names(reached: Mapping[str, Estimate], metric: Metric, points: Sequence[svg.Point]) -> Iterator[Markup]:
    """Draw the name of each run next to its dot, without overlaps."""
    heights = apart([y for _, y in points])
    for (arm, value), (x, _), height in zip(reached.items(), points, heights, strict=True):
        name = f"{svg.shorten(arm, 18)} {metric.text(value.mean)}"
        is_left = x + 10 + svg.width_of(name) > svg.WIDTH
        yield svg.text(x - 10 if is_left else x + 10, height + 4, name, "halo", "end" if is_left else None)
