"""What growth bought: the score of every run against its parameters and against its compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, NamedTuple

from esper.karn import notation
from esper.karn.drawing import svg
from esper.karn.drawing.axes import Scale, around, y_axis
from esper.karn.drawing.picture import Picture
from esper.karn.drawing.svg import Markup
from esper.karn.questions.episodes import final_episodes
from esper.karn.run import Run
from esper.karn.statistics import Estimate, estimate
from esper.karn.summary import PART_OF_OTHERS

_LEFT: Final = 48.0
_RIGHT: Final = svg.WIDTH - 26
_PANEL: Final = 170.0
_STEP: Final = 226.0
"""From the top of one panel to the top of the next."""
_TOP: Final = 14.0


@dataclass(frozen=True, slots=True)
class Arm:
    """One run of a comparison, by the episodes that say what it came to."""

    name: str
    episodes: int
    test_score: Estimate
    """Of the committed networks, with its 95 % interval where there are several episodes."""
    val_score: Estimate
    params: float
    """Mean of the committed networks."""
    flops: float
    """Mean compute of a whole episode, each operation counted once."""
    flops_per_sample: float
    """Mean of one forward pass of the committed networks."""


def verdict(runs: Mapping[str, Run]) -> tuple[Arm, ...]:
    """The arms that have a finished episode, in the order given."""
    arms = (_arm(name, run) for name, run in runs.items())
    return tuple(arm for arm in arms if arm is not None)


def _arm(name: str, run: Run) -> Arm | None:
    parts = ", ".join(f"'{purpose}'" for purpose in sorted(PART_OF_OTHERS))
    found = run.sql(
        f"""
        SELECT test_score, val_score, params, flops_per_sample,
               list_sum([entry.value FOR entry IN map_entries(flops) IF entry.key NOT IN ({parts})])
        FROM episode WHERE {final_episodes(run)}
        """
    ).fetchall()
    if not found:
        return None
    test, validation, params, per_sample, flops = zip(*found, strict=True)
    return Arm(
        name=name,
        episodes=len(found),
        test_score=estimate(test),
        val_score=estimate(validation),
        params=fmean(params),
        flops=fmean(flops),
        flops_per_sample=fmean(per_sample),
    )


def verdict_picture(runs: Mapping[str, Run]) -> Picture | None:
    """The answer of several runs; None: none of them has a finished episode."""
    arms = verdict(runs)
    return draw_verdict(arms) if arms else None


def draw_verdict(arms: Sequence[Arm]) -> Picture:
    """Two panels with one score axis each."""
    return Picture(
        svg=svg.drawing(
            2 * _STEP + 4,
            "Score against parameters and compute",
            "; ".join(f"{arm.name} {_score(arm.test_score)}" for arm in arms),
            _draw_panel(arms, lambda arm: arm.params, "parameters", _TOP),
            _draw_panel(arms, lambda arm: arm.flops, "FLOP of an episode", _TOP + _STEP),
        ),
        columns=["arm", "episodes", "test", "validation", "parameters", "compute of an episode", "inference"],
        rows=[_cells(arm) for arm in arms],
        caption="Test score of the committed networks, with 95 % intervals where there are several episodes.",
    )


def _score(score: Estimate) -> str:
    return notation.points(score.mean) if math.isnan(score.half_width) else str(score)


def _cells(arm: Arm) -> list[str]:
    return [
        arm.name,
        notation.count(arm.episodes),
        _score(arm.test_score),
        _score(arm.val_score),
        notation.count(round(arm.params)),
        notation.flop(round(arm.flops)),
        notation.flop(round(arm.flops_per_sample)),
    ]


def _draw_panel(arms: Sequence[Arm], cost: Callable[[Arm], float], name: str, top: float) -> Markup:
    ends = [end for arm in arms for end in _interval(arm.test_score)]
    low, high = around([max(min(end, 100.0), 0.0) for end in ends], 4, floor=0.0)
    y = Scale(low, min(high, 100.0), top + _PANEL, top)
    costs = [max(cost(arm), 1.0) for arm in arms]
    first, last = math.log10(min(costs)), math.log10(max(costs))
    margin = max(0.08 * (last - first), 0.1)
    x = Scale(first - margin, last + margin, _LEFT, _RIGHT)
    places = [(x(math.log10(at)), y(arm.test_score.mean)) for at, arm in zip(costs, arms, strict=True)]
    return svg.group(
        [
            y_axis(y, _LEFT, _RIGHT),
            *_cost_axis(x, top + _PANEL, name),
            *(
                svg.line(at, y(low_end), at, y(high_end), "thin")
                for arm, (at, _) in zip(arms, places, strict=True)
                for low_end, high_end in [_interval(arm.test_score)]
                if high_end > low_end
            ),
            svg.path(svg.dots(places), "dot"),
            *_names([_label(arm) for arm in arms], places, top, top + _PANEL - 8),
        ]
    )


def _label(arm: Arm) -> str:
    return f"{svg.shorten(arm.name, 18)} {notation.points(arm.test_score.mean)}"


def _interval(score: Estimate) -> tuple[float, float]:
    if math.isnan(score.half_width):
        return score.mean, score.mean
    return max(score.low, 0.0), min(score.high, 100.0)


def _cost_axis(x: Scale, bottom: float, name: str) -> Iterator[Markup]:
    """Costs lie so far apart that each step of the axis is a factor."""
    yield svg.line(x.start, bottom, x.stop, bottom, "axis")
    exponents = range(math.floor(x.low), math.ceil(x.high) + 1)
    values = [factor * 10.0**exponent for exponent in exponents for factor in (1, 2, 5)]
    shown = [value for value in values if x.low <= math.log10(value) <= x.high]
    if len(shown) > 7:
        shown = [value for value in shown if math.isclose(math.log10(value) % 1, 0, abs_tol=1e-9)]
    for value in shown:
        yield svg.text(x(math.log10(value)), bottom + svg.LINE + 2, short_count(value), "dim", "middle")
    yield svg.text(x.stop, bottom + 2 * svg.LINE + 4, name, "dim", "end")


def short_count(value: float) -> str:
    """A round number with the letter of its size."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _names(
    names: Sequence[str], places: Sequence[svg.Point], highest: float, lowest: float
) -> Iterator[Markup]:
    """Each name beside its mark, moved up or down where another one is in the way."""
    taken: list[_Room] = []
    for name, (x, y) in sorted(zip(names, places, strict=True), key=lambda one: one[1][1]):
        width = svg.width_of(name)
        is_left = x + 10 + width > svg.WIDTH
        start = x - 10 - width if is_left else x + 10
        rooms = (_Room(start, start + width, height) for height in _nearby(y, highest, lowest))
        room = next((room for room in rooms if not any(room.meets(other) for other in taken)), None)
        if room is not None:  # else the table tells
            taken.append(room)
            anchor = "end" if is_left else None
            yield svg.text(x - 10 if is_left else x + 10, room.height + 4, name, "halo", anchor)


class _Room(NamedTuple):
    """What a name takes up."""

    start: float
    end: float
    height: float

    def meets(self, other: _Room) -> bool:
        beside = self.end <= other.start or other.end <= self.start
        return not beside and abs(self.height - other.height) < svg.LINE


def _nearby(height: float, highest: float, lowest: float) -> Iterator[float]:
    """Heights in a panel, the nearest first."""
    steps = range(int((lowest - highest) / 2))
    for candidate in (height + side * 2 * step for step in steps for side in (1, -1)):
        if highest <= candidate <= lowest:
            yield candidate
