"""Where does the time go: the phases of every iteration, or of every epoch."""

from __future__ import annotations

from dataclasses import dataclass

from esper.karn.questions.episodes import EpisodeKey
from esper.karn.questions.places import AxisName, Place, axis_of
from esper.karn.run import Run


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
