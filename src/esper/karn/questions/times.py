"""Where does the time go: the phases of every iteration or epoch, drawn as stacked columns."""

from __future__ import annotations

from dataclasses import dataclass

from esper.karn import notation
from esper.karn.drawing.chart import Chart, Panel, Part, draw
from esper.karn.drawing.picture import Picture
from esper.karn.drawing.style import part_look
from esper.karn.questions.episodes import EpisodeKey
from esper.karn.questions.places import AxisName, Place, axis_of
from esper.karn.run import Run
from esper.karn.statistics import mean


@dataclass(frozen=True, slots=True)
class TimePoint:
    """Mean milliseconds of each phase at one place, in the order of the names; None is unknown."""

    place: Place
    phases: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Times:
    """Phases over the iterations of a training, or over epochs."""

    axis: AxisName
    end: int
    phases: tuple[str, ...]
    """The longest first."""
    points: tuple[TimePoint, ...]


def times(run: Run, episode: EpisodeKey | None = None) -> Times | None:
    """Of one episode or, without one, of the whole run; None: no time was recorded."""
    axis = axis_of(run, episode)
    table, place = ("update", "iteration") if axis.name == "iteration" else ("epoch", "epoch")
    condition = "true" if axis.name == "iteration" else axis.condition
    phases = [
        name
        for name, _ in run.sql(
            f"""
        SELECT phase, sum(ms) AS total
        FROM (SELECT unnest(map_keys(phase_ms)) AS phase, unnest(map_values(phase_ms)) AS ms
              FROM {table} WHERE {condition})
        GROUP BY phase ORDER BY total DESC, phase
        """,
            axis.parameters,
        ).fetchall()
    ]
    if not phases:
        return None
    means = ", ".join(["avg(phase_ms[?])"] * len(phases))
    found = run.sql(
        f"""
        SELECT min({place}), max({place}), {means} FROM {table} WHERE {condition}
        GROUP BY {axis.group(place)} ORDER BY 1
        """,
        [*phases, *axis.parameters],
    ).fetchall()
    points = tuple(TimePoint(Place(first, last), tuple(spent)) for first, last, *spent in found)
    return Times(axis.name, max(axis.end, points[-1].place.last), tuple(phases), points)


def draw_times(found: Times, beside: Times | None = None) -> Picture:
    """One column per epoch or iteration."""
    held = [point for one in (found, beside) if one is not None for point in one.points]
    longest = max(sum(phase or 0.0 for phase in point.phases) for point in held)
    unit, size = ("s", 1000.0) if longest >= 1000 else ("ms", 1.0)
    return Picture(
        svg=draw(_chart(found, unit, size), None if beside is None else _chart(beside, unit, size)),
        columns=[found.axis, *found.phases],
        rows=[
            [str(point.place), *(notation.duration(phase) for phase in point.phases)]
            for point in found.points
        ],
        caption=f"Mean time per {found.axis}; beside it, over the whole run.",
    )


def _chart(found: Times, unit: str, size: float) -> Chart:
    def text(value: float | None) -> str:
        return notation.duration(None if value is None else value * size)

    parts = []
    for index, name in enumerate(found.phases):
        spent = [None if (ms := point.phases[index]) is None else ms / size for point in found.points]
        parts.append(Part(name, spent, text, part_look(index), total=mean(spent)))
    return Chart(
        title="Time by phase",
        description=", ".join(f"{part.name} {text(part.total)}" for part in parts),
        axis=found.axis,
        end=found.end,
        places=[point.place for point in found.points],
        panels=[Panel(140, parts=parts, zero=True, ticks=3, unit=unit)],
        room=190,
    )
