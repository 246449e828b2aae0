"""What does the decision maker choose: the mix of ops, what it had no choice in, and what failed."""

from __future__ import annotations

from dataclasses import dataclass

from esper.karn.questions.episodes import EpisodeKey
from esper.karn.questions.places import Axis, AxisName, Place, axis_of
from esper.karn.run import Run


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
