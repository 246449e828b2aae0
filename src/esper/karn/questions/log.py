"""What is to be told line by line: epochs, stage changes and ends of episodes, or iterations, and alerts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from esper.karn.questions.episodes import is_training
from esper.karn.questions.growth import growth
from esper.karn.run import Run
from esper.leyline.columns import TABLE_OF
from esper.leyline.events import AlertRow, EpisodeRow, EpochRow, Row, TransitionRow, UpdateRow
from esper.leyline.stages import Stage

Stamp = tuple[str, float]
"""Table and time of a row. A resumed training writes its iterations anew, at other times."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A row, with what belongs to it from other tables."""

    row: Row
    stages: tuple[Stage, ...] = ()
    """Of all slots, when an epoch ended."""
    twin_score: float | None = None
    """Of an iteration: the mean of the twins of the episodes that lasted; None: no twin is known."""

    @property
    def stamp(self) -> Stamp:
        return TABLE_OF[type(self.row)], self.row.t


def stamps(run: Run) -> set[Stamp]:
    """Of all rows that are told."""
    tables = (TABLE_OF[kind] for kind in _told(run))
    union = " UNION ALL ".join(f"SELECT '{table}' AS name, t FROM {table}" for table in tables)
    return set(run.sql(union).fetchall())


def log(run: Run, seen: Collection[Stamp] = ()) -> list[LogEntry]:
    """What is not among the ``seen`` rows, in the order in which it happened."""
    fresh = stamps(run).difference(seen)
    rows = [row for kind in _told(run) for row in _fresh_rows(run, kind, fresh)]
    rows.sort(key=lambda row: row.t)
    epochs = [row for row in rows if isinstance(row, EpochRow)]
    moves = run.rows(TransitionRow, "episode >= ?", [min(row.episode for row in epochs)]) if epochs else []
    grown = growth(run, joined=False) if is_training(run) and rows else None
    twins = (
        {} if grown is None else {p.last: twin for p, twin in zip(grown.places, grown["twin"], strict=True)}
    )
    return [_entry(run, row, moves, twins) for row in rows]


def _told(run: Run) -> tuple[type[Row], ...]:
    return (UpdateRow, AlertRow) if is_training(run) else (TransitionRow, EpochRow, EpisodeRow, AlertRow)


def _fresh_rows(run: Run, kind: type[Row], fresh: Collection[Stamp]) -> list[Row]:
    table = TABLE_OF[kind]
    times = [t for name, t in fresh if name == table]
    found = run.rows(kind, "t >= ?", [min(times)]) if times else []
    return [row for row in found if (table, row.t) in fresh]


def _entry(run: Run, row: Row, moves: Sequence[TransitionRow], twins: dict[int, float | None]) -> LogEntry:
    if isinstance(row, UpdateRow):
        return LogEntry(row, twin_score=twins.get(row.iteration))
    if not isinstance(row, EpochRow):
        return LogEntry(row)
    episode = (row.env, row.episode, row.attempt)
    reached = {
        move.slot: Stage(move.to_stage)
        for move in moves
        if (move.env, move.episode, move.attempt) == episode and move.t <= row.t
    }
    return LogEntry(row, stages=tuple(reached.get(i, Stage.DORMANT) for i in range(len(run.row.slots))))
