"""What does the controller choose: the mix of ops, what it had no choice in, and what failed.

The picture: ops as stacked columns, forced waiting striped, failures above.
"""

from __future__ import annotations

from dataclasses import dataclass

from esper.karn import notation
from esper.karn.drawing.chart import Chart, Panel, Part, draw
from esper.karn.drawing.picture import Picture
from esper.karn.palette import OP_STAGES
from esper.karn.questions.episodes import EpisodeKey
from esper.karn.questions.places import Axis, AxisName, Place, axis_of
from esper.karn.run import Run
from esper.leyline.stages import Stage


@dataclass(frozen=True, slots=True)
class OpCount:
    """How often one op was chosen; None is unknown."""

    chosen: int
    forced: int | None
    """Of these, where nothing else was legal."""
    failed: int | None
    """Of these, that did not come about."""


@dataclass(frozen=True, slots=True)
class ChoicePoint:
    """The decisions at one place."""

    place: Place
    ops: tuple[OpCount, ...]
    """In the order of the run's ops."""

    @property
    def total(self) -> int:
        return sum(op.chosen for op in self.ops)

    def share(self, count: int) -> float:
        """Of all decisions at this place."""
        return count / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True)
class Choices:
    """Decisions over the iterations of a training, or over epochs."""

    axis: AxisName
    end: int
    ops: tuple[str, ...]
    points: tuple[ChoicePoint, ...]


def choices(run: Run, episode: EpisodeKey | None = None) -> Choices | None:
    """Of one episode or, without one, of the whole run; None: no decision is known."""
    axis = axis_of(run, episode)
    points = _from_decisions(run, axis) or _from_episodes(run, axis)
    if not points:
        return None
    end = max(axis.end, points[-1].place.last)
    return Choices(axis.name, end, tuple(run.row.ops), points)


def _from_decisions(run: Run, axis: Axis) -> tuple[ChoicePoint, ...]:
    op = f"action[{run.row.heads.index('op') + 1}]"
    place = axis.place("epoch + 1")  # decided before the epoch that it is about
    found = run.sql(
        f"""
        SELECT min({place}), max({place}), {axis.group(place)} AS together, {op} AS op, count(*),
               count(*) FILTER (forced), count(*) FILTER (NOT succeeded)
        FROM decision WHERE {axis.condition} GROUP BY together, op ORDER BY together
        """,
        axis.parameters,
    ).fetchall()
    counts: dict[int, dict[int, OpCount]] = {}
    places: dict[int, Place] = {}
    for first, last, together, chosen_op, *numbers in found:
        counts.setdefault(together, {})[chosen_op] = OpCount(*numbers)
        before = places.get(together, Place(first, last))
        places[together] = Place(min(before.first, first), max(before.last, last))
    never = OpCount(0, 0, 0)
    return tuple(
        ChoicePoint(places[together], tuple(of_op.get(index, never) for index in range(len(run.row.ops))))
        for together, of_op in counts.items()
    )


def _from_episodes(run: Run, axis: Axis) -> tuple[ChoicePoint, ...]:
    """Where decisions were not recorded, episodes know how often each op was chosen, by iteration alone."""
    if axis.name != "iteration":
        return ()
    sums = ", ".join(f"sum(op_counts[{index + 1}])" for index in range(len(run.row.ops)))
    place = axis.place()
    found = run.sql(
        f"SELECT min({place}), max({place}), {sums} FROM episode GROUP BY {axis.group(place)} ORDER BY 1"
    ).fetchall()
    return tuple(
        ChoicePoint(Place(first, last), tuple(OpCount(int(count or 0), None, None) for count in counts))
        for first, last, *counts in found
    )


def draw_choices(found: Choices, beside: Choices | None = None) -> Picture:
    """One column per epoch or iteration."""
    return Picture(
        svg=draw(_chart(found), None if beside is None else _chart(beside)),
        columns=[found.axis, "decisions", *(op_name(op) for op in found.ops), "forced", "failed"],
        rows=[_cells(point) for point in found.points],
        caption=_caption(found),
    )


def op_name(op: str) -> str:
    """An op as people say it, short enough for a label."""
    return op.lower().replace("_", " ").removesuffix(" target")


def _chart(found: Choices) -> Chart:
    total = sum(point.total for point in found.points)
    parts = []
    for index, op in enumerate(found.ops):
        counts = [(point, point.ops[index]) for point in found.points]
        chosen = sum(count.chosen for _, count in counts)
        forced = [100 * point.share(count.forced or 0) for point, count in counts]
        shares = [100 * point.share(count.chosen) for point, count in counts]
        parts.append(Part(op_name(op), shares, _percent, _look(op), 100 * chosen / total, forced))
    failed = [_part(point, [op.failed for op in point.ops]) for point in found.points]
    failures = [None if share is None else 100 * share for share in failed]
    overall = 100 * sum(op.failed or 0 for point in found.points for op in point.ops) / total
    return Chart(
        title="Mix of ops",
        description=", ".join(f"{part.name} {_percent(part.total)}" for part in parts if part.total),
        axis=found.axis,
        end=found.end,
        places=[point.place for point in found.points],
        panels=[
            Panel(
                16,
                parts=[Part("failed", failures, _percent, "error", overall)],
                zero=True,
                optional=True,
                ticks=1,
            ),
            Panel(170, parts=parts, zero=True, most=100.0, ticks=2, unit="%"),
        ],
        room=168,
    )


def _percent(value: float | None) -> str:
    return notation.share(None if value is None else value / 100)


def _look(op: str) -> str:
    stage = OP_STAGES.get(op, Stage.UNKNOWN)
    return "idle" if stage is Stage.DORMANT else stage.name.lower()


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


def _caption(found: Choices) -> str:
    if any(op.forced is None for point in found.points for op in point.ops):
        return (
            "Shares of all decisions. Decisions were not recorded one by one: forced and failed are unknown."
        )
    return "Shares of all decisions. Striped: nothing but waiting was legal. Above: what failed."
