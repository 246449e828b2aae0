"""What the decision maker chooses: ops as stacked columns, forced waiting striped, failures marked."""

from __future__ import annotations

from typing import Final

from esper.karn import notation
from esper.karn.figures import svg
from esper.karn.figures.axes import Scale, alike, shared_end, x_axis
from esper.karn.figures.labels import Label, beside_areas
from esper.karn.figures.picture import Picture
from esper.karn.figures.stacks import column, edges, stack
from esper.karn.figures.svg import Markup, number
from esper.karn.palette import OP_STAGES
from esper.karn.questions.choices import ChoicePoint, Choices, OpCount, choices
from esper.karn.questions.episodes import EpisodeKey
from esper.karn.run import Run
from esper.leyline.stages import Stage

_LEFT: Final = 56.0
_RIGHT: Final = svg.WIDTH - 168
_FAILED: Final = (4.0, 20.0)
_COLUMNS: Final = (30.0, 200.0)


def choices_picture(run: Run, episode: EpisodeKey | None = None) -> Picture | None:
    """The answer of one episode or of the whole run."""
    found = choices(run, episode)
    return None if found is None else draw_choices(found)


def choices_beside(run: Run, other: Run) -> Picture | None:
    """The whole run on axes that hold another one too."""
    found = choices(run)
    return None if found is None else draw_choices(found, alike(found, choices(other)))


def draw_choices(found: Choices, beside: Choices | None = None) -> Picture:
    """One column per epoch or iteration, on axes that hold what is beside it too."""
    x = Scale(0, shared_end(found, beside), _LEFT, _RIGHT)
    y = Scale(0, 1, _COLUMNS[1], _COLUMNS[0])
    return Picture(
        svg=svg.drawing(
            _COLUMNS[1] + 28,
            "Mix of ops",
            ", ".join(f"{name} {notation.share(share)}" for name, share in _overall(found)),
            x_axis(x, _COLUMNS[1], found.axis),
            *(
                svg.text(_LEFT - 6, y(share) + 4, f"{100 * share:.0f} %", "dim", "end")
                for share in (0.0, 0.5, 1.0)
            ),
            *_draw_columns(found, x, y),
            _draw_failures(found, x, max(_most_failed(found), _most_failed(beside))),
            _draw_labels(found, y),
        ),
        columns=[found.axis, "decisions", *(op_name(op) for op in found.ops), "forced", "failed"],
        rows=[_cells(point) for point in found.points],
        caption=_caption(found),
    )


def op_name(op: str) -> str:
    """An op as people say it, short enough for a label."""
    return op.lower().replace("_", " ").removesuffix(" target")


def _cells(point: ChoicePoint) -> list[str]:
    return [
        str(point.place),
        notation.count(point.total),
        *(notation.share(point.share(op.chosen)) for op in point.ops),
        notation.share(_part(point, [op.forced for op in point.ops])),
        notation.share(_part(point, [op.failed for op in point.ops])),
    ]


def _part(point: ChoicePoint, counts: list[int | None]) -> float | None:
    return None if None in counts else point.share(sum(count for count in counts if count is not None))


def _overall(found: Choices) -> list[tuple[str, float]]:
    """The share of each op over the whole run."""
    total = sum(point.total for point in found.points)
    chosen = [sum(point.ops[index].chosen for point in found.points) for index in range(len(found.ops))]
    return [(op_name(op), count / total) for op, count in zip(found.ops, chosen, strict=True) if count]


def _caption(found: Choices) -> str:
    known = all(op.forced is not None for point in found.points for op in point.ops)
    if not known:
        return (
            "Shares of all decisions. Decisions were not recorded one by one: forced and failed are unknown."
        )
    return "Shares of all decisions. Striped: nothing but waiting was legal. Above: what failed."


def _draw_columns(found: Choices, x: Scale, y: Scale) -> list[Markup]:
    parts = ["" for _ in found.ops]
    forced = ""
    for point in found.points:
        segments = stack([point.share(op.chosen) for op in point.ops])
        for index, (op, segment) in enumerate(zip(point.ops, segments, strict=True)):
            parts[index] += column(point.place, segment, x, y)
            forced += _hatch(point, op, segment[0], x, y)
    shares = [svg.path(commands, _look(op)) for op, commands in zip(found.ops, parts, strict=True)]
    width = min(edges(point.place, x)[1] - edges(point.place, x)[0] for point in found.points)
    return [*shares, svg.path(forced, "hatch", stroke_width=width)]


def _look(op: str) -> str:
    stage = OP_STAGES.get(op, Stage.UNKNOWN)
    return "idle" if stage is Stage.DORMANT else stage.name.lower()


def _hatch(point: ChoicePoint, op: OpCount, start: float, x: Scale, y: Scale) -> str:
    if not op.forced:
        return ""
    left, right = edges(point.place, x)
    top = y(start + point.share(op.forced))
    return f"M{number((left + right) / 2)} {number(y(start))}V{number(top)}"


def _failed(found: Choices) -> list[float | None]:
    return [_part(point, [op.failed for op in point.ops]) for point in found.points]


def _most_failed(found: Choices | None) -> float:
    shares = [] if found is None else _failed(found)
    return max((share for share in shares if share is not None), default=0.0)


def _draw_failures(found: Choices, x: Scale, most: float) -> Markup:
    """The share that failed, as columns up to ``most`` over the others."""
    failed = _failed(found)
    if not any(failed):
        return Markup("")
    y = Scale(0, most, _FAILED[1], _FAILED[0])
    columns = "".join(
        column(point.place, (0.0, share or 0.0), x, y)
        for point, share in zip(found.points, failed, strict=True)
    )
    label = Label(f"failed {notation.share(_failed_overall(found))}", sum(_FAILED) / 2, "error")
    return Markup(svg.path(columns, "error") + beside_areas(_RIGHT + 10, [label], _FAILED[1], _FAILED[0]))


def _failed_overall(found: Choices) -> float:
    total = sum(point.total for point in found.points)
    return sum(op.failed or 0 for point in found.points for op in point.ops) / total


def _draw_labels(found: Choices, y: Scale) -> Markup:
    """The ops with their shares over the whole run, beside where they stand in the last column."""
    last = found.points[-1]
    segments = stack([last.share(op.chosen) for op in last.ops])
    names = dict(_overall(found))
    labels = [
        Label(f"{op_name(op)} {notation.share(names[op_name(op)])}", y(sum(segment) / 2), _look(op))
        for op, segment in zip(found.ops, segments, strict=True)
        if op_name(op) in names
    ]
    return beside_areas(_RIGHT + 10, labels, _COLUMNS[1], _COLUMNS[0])
