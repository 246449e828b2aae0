"""Where the time goes: the phases of every iteration or epoch as stacked columns."""

from __future__ import annotations

from typing import Final

from esper.karn import notation
from esper.karn.figures import svg
from esper.karn.figures.axes import Scale, alike, around, shared_end, x_axis, y_axis
from esper.karn.figures.labels import Label, beside_areas
from esper.karn.figures.picture import Picture
from esper.karn.figures.stacks import column, stack
from esper.karn.figures.style import part_look
from esper.karn.questions.episodes import EpisodeKey
from esper.karn.questions.times import Times, times
from esper.karn.run import Run

_LEFT: Final = 52.0
_RIGHT: Final = svg.WIDTH - 190
_COLUMNS: Final = (24.0, 164.0)


def times_picture(run: Run, episode: EpisodeKey | None = None) -> Picture | None:
    """The answer of one episode or of the whole run."""
    found = times(run, episode)
    return None if found is None else draw_times(found)


def times_beside(run: Run, other: Run) -> Picture | None:
    """The whole run on axes that hold another one too."""
    found = times(run)
    return None if found is None else draw_times(found, alike(found, times(other)))


def draw_times(found: Times, beside: Times | None = None) -> Picture:
    """One column per epoch or iteration, on axes that hold what is beside it too."""
    held = [*found.points, *(beside.points if beside else ())]
    longest = max(sum(phase or 0.0 for phase in point.phases) for point in held)
    unit, size = ("s", 1000.0) if longest >= 1000 else ("ms", 1.0)
    x = Scale(0, shared_end(found, beside), _LEFT, _RIGHT)
    y = Scale(*around([0.0, longest / size], 3), _COLUMNS[1], _COLUMNS[0])
    stacks = [stack([(phase or 0.0) / size for phase in point.phases]) for point in found.points]
    columns = [
        svg.path(
            "".join(
                column(point.place, segments[index], x, y)
                for point, segments in zip(found.points, stacks, strict=True)
            ),
            part_look(index),
        )
        for index in range(len(found.phases))
    ]
    labels = [
        Label(f"{svg.shorten(name, 10)} {notation.duration(spent)}", y(sum(segment) / 2), part_look(index))
        for index, (name, spent, segment) in enumerate(
            zip(found.phases, _means(found), stacks[-1], strict=True)
        )
    ]
    return Picture(
        svg=svg.drawing(
            _COLUMNS[1] + 28,
            "Time by phase",
            ", ".join(
                f"{name} {notation.duration(spent)}"
                for name, spent in zip(found.phases, _means(found), strict=True)
            ),
            svg.text(_LEFT - 6, 12, unit, "dim", "end"),
            y_axis(y, _LEFT, _RIGHT, most=4),
            *columns,
            x_axis(x, _COLUMNS[1], found.axis),
            beside_areas(_RIGHT + 10, labels, _COLUMNS[1], _COLUMNS[0]),
        ),
        columns=[found.axis, *found.phases],
        rows=[
            [str(point.place), *(notation.duration(phase) for phase in point.phases)]
            for point in found.points
        ],
        caption=f"Mean time per {found.axis}; beside it, over the whole run.",
    )


def _means(found: Times) -> list[float | None]:
    """Of each phase over all places where it is known."""
    means: list[float | None] = []
    for index in range(len(found.phases)):
        known = [spent for point in found.points if (spent := point.phases[index]) is not None]
        means.append(sum(known) / len(known) if known else None)
    return means
