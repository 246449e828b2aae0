"""Rows as points: which numbers of a row are exported, under which names, and where on which axis.

Every exporter shows these points and adds nothing of its own. A table has one step axis. ``None`` is
left out: a gap says unknown, a 0 would not.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeGuard

from esper.leyline.columns import TABLE_OF
from esper.leyline.errors import EsperError
from esper.leyline.events import EpisodeRow, EpochRow, Row, RunRow, UpdateRow

STEP_COLUMNS: Final = {UpdateRow: "iteration", EpisodeRow: "episode", EpochRow: "epoch"}
"""The tables that can be exported, and the column that is the step axis of each."""
LIST_NAMES: Final = {
    "op_shares": "ops",
    "op_counts": "ops",
    "head_entropy": "heads",
    "head_grad_norm": "heads",
}
"""The lists of numbers, and the column of the run's row that names their entries."""
_POSITION: Final = {"t", "env", "episode", "attempt", "iteration"}
_ORIGIN: Final = ("name", "started", "schema_version", "data_hash", "git_revision", "versions", "hardware")


class ExportError(EsperError):
    """A run that cannot be exported as asked."""


class Points(NamedTuple):
    """The numbers of one row."""

    table: str
    axis: str
    step: int
    t: float
    """Seconds since the run began."""
    values: Mapping[str, float]
    """By tag: table, column, then the entry of a list or a map, then the episode."""


def create_export_folder(out: Path, *, alone: bool = True) -> None:
    """Make the directory of an export, in which nothing else may be: points twice would count twice."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"'{out}' cannot be written: {error.strerror}; choose another --out") from error
    if alone and any(out.iterdir()):
        raise ExportError(
            f"'{out}' is not empty; an export goes into a directory of its own:"
            " remove this one to export anew, or choose another with --out"
        )


def exported_types(run: RunRow) -> tuple[type[Row], ...]:
    """The tables that are exported of a run.

    Epochs of a training are not: each of its thousands of episodes would need tags of its own.
    """
    return (UpdateRow, EpisodeRow) if run.iterations is not None else (EpochRow, EpisodeRow)


def points_of(row: Row, run: RunRow) -> Points:
    """All numbers of a row; ``run`` has the names of what stands in lists."""
    table, axis = TABLE_OF[type(row)], STEP_COLUMNS[type(row)]
    episode = _episode_of(row)
    values: dict[str, float] = {}
    for column in row.__struct_fields__:
        if column not in _POSITION and column != axis:
            for path, number in _numbers(column, getattr(row, column), run):
                values["/".join((table, *path, *episode))] = number
    return Points(table, axis, getattr(row, axis), row.t, values)


def wall_time(run: RunRow, t: float) -> float:
    """The moment ``t`` seconds after the run began, in seconds since 1970."""
    try:
        return datetime.fromisoformat(run.started).timestamp() + t
    except (ValueError, OverflowError):
        raise ExportError(f"the run began at no time that can be read: '{run.started[:80]}'") from None


def provenance(run: RunRow) -> dict[str, Any]:
    """Where a run comes from: what its configuration does not say."""
    return {name: getattr(run, name) for name in _ORIGIN}


def _episode_of(row: Row) -> tuple[str, ...]:
    """What tells the episodes of a table apart, other than their steps."""
    match row:
        case EpochRow():
            return (f"env{row.env}-episode{row.episode}",)
        case EpisodeRow():
            return (f"env{row.env}-attempt{row.attempt}" if row.attempt else f"env{row.env}",)
    return ()


def _numbers(column: str, value: object, run: RunRow) -> Iterator[tuple[tuple[str, ...], float]]:
    """The numbers of a column, each with its path; what is no number is passed over."""
    if isinstance(value, list) and column in LIST_NAMES:
        value = _named(column, value, run)
    if isinstance(value, dict):
        for name, entry in value.items():
            if _is_number(entry):
                yield (column, name), entry
    elif _is_number(value):
        yield (column,), value


def _named(column: str, entries: list[Any], run: RunRow) -> dict[str, Any]:
    names = getattr(run, LIST_NAMES[column])
    if len(names) != len(entries):
        raise ExportError(
            f"column '{column}' holds {len(entries)} entries where the run names {len(names)}"
            f" {LIST_NAMES[column]}; its telemetry is damaged"
        )
    return dict(zip(names, entries, strict=True))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
