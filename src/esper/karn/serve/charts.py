"""Numbers for the curves that a reader can point at: the same as in the figures, with their texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

from esper.karn import notation
from esper.karn.questions.episodes import EpisodeKey
from esper.karn.questions.growth import Growth, growth
from esper.karn.questions.improvement import Improvement, improvement
from esper.karn.run import Run

Look = Literal["main", "ghost", "steps", "dots"]


@dataclass(frozen=True, slots=True)
class Line:
    """One line, and what its values read as."""

    label: str
    look: Look
    values: list[float | None]
    texts: list[str]


@dataclass(frozen=True, slots=True)
class Fan:
    """The area between two lines."""

    low: list[float | None]
    high: list[float | None]
    inner: bool


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines over the chart's axis, drawn on top of the fans."""

    height: int
    lines: list[Line]
    fans: list[Fan] = field(default_factory=list)
    floor: float | None = None
    """Belongs to the axis whatever the values are."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Plots below each other, over one axis."""

    axis: str
    end: int
    """Where the axis ends, which may be later than what is known."""
    x: list[int]
    places: list[str]
    """Where each point is, as text."""
    plots: list[Plot]


def growth_chart(run: Run, episode: EpisodeKey | None = None) -> Chart | None:
    """Scores with the twin's as a ghost, parameters below; None where nothing is known."""
    found = growth(run, episode)
    return None if found is None else chart_of_growth(found)


def chart_of_growth(found: Growth) -> Chart:
    """The chart of these numbers."""
    points = found.points
    lines = [_line("score", "main", [point.score for point in points], notation.points)]
    if any(point.twin is not None for point in points):
        lines.append(_line("twin", "ghost", [point.twin for point in points], notation.points))
    fans = []
    if any(point.episodes > 1 for point in points):
        fans = [
            Fan([point.low for point in points], [point.high for point in points], inner=False),
            Fan([p.quarter for p in points], [p.three_quarters for p in points], inner=True),
        ]
    params = [_line("params", "steps", [point.params for point in points], notation.count)]
    return Chart(
        axis=found.axis,
        end=found.end,
        x=[point.place.last for point in points],
        places=[str(point.place) for point in points],
        plots=[Plot(200, lines, fans), Plot(70, params, floor=0.0)],
    )


def improvement_chart(run: Run, episode: EpisodeKey | None = None) -> Chart | None:
    """Returns with their middle half, scores below; None where nothing is trained."""
    found = improvement(run)
    return None if found is None else chart_of_improvement(found)


def chart_of_improvement(found: Improvement) -> Chart:
    """The chart of these numbers."""
    points = found.points
    returns = [_line("median return", "main", [point.median for point in points], _reward)]
    returns += _evaluated("argmax", [point.evaluation_return for point in points], _reward)
    fan = Fan([p.quarter for p in points], [p.three_quarters for p in points], inner=True)
    scores = [_line("score", "main", [point.score for point in points], notation.points)]
    scores += _evaluated("argmax", [point.evaluation_score for point in points], notation.points)
    return Chart(
        axis="iteration",
        end=found.iterations,
        x=[point.place.last for point in points],
        places=[str(point.place) for point in points],
        plots=[Plot(150, returns, [fan]), Plot(120, scores)],
    )


CHARTS: Final[Mapping[str, Callable[[Run, EpisodeKey | None], Chart | None]]] = MappingProxyType(
    {"growth": growth_chart, "improvement": improvement_chart}
)
"""By the key of the figure whose place the chart takes."""


def _line(
    label: str,
    look: Look,
    values: Sequence[float | None],
    text: Callable[[float | None], str],
) -> Line:
    return Line(label, look, list(values), [text(value) for value in values])


def _evaluated(label: str, values: Sequence[float | None], text: Callable[[float | None], str]) -> list[Line]:
    """Evaluations are dots, since most iterations have none."""
    return [_line(label, "dots", values, text)] if any(value is not None for value in values) else []


def _reward(value: float | None) -> str:
    return notation.gain(value, 2)
