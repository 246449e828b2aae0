"""Numbers of a row for export, with their tags and step axis.

All exporters write the same points. A table has one step axis. A value of ``None`` is left out, so that an
unknown value is a gap and not 0.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeGuard

from esper.leyline import EpisodeRow, EpochRow, EsperError, Row, RunRow, UpdateRow
from esper.leyline.columns import TABLE_OF

STEP_COLUMNS: Final = {UpdateRow: "iteration", EpisodeRow: "episode", EpochRow: "epoch"}
"""Row types that can be exported, with the column of their step axis."""
LIST_NAMES: Final = {
    "op_shares": "ops",
    "op_counts": "ops",
    "head_entropy": "heads",
    "head_grad_norm": "heads",
}
"""Columns that are lists of numbers, with the column of the run row that names their entries."""
_POSITION: Final = {"t", "env", "episode", "attempt", "iteration"}
_ORIGIN: Final = ("name", "started", "schema_version", "data_hash", "git_revision", "versions", "hardware")


class ExportError(EsperError):
    """Error: a run cannot be exported as requested."""


class Points(NamedTuple):
    """Points for export: the numbers of one row."""

    table: str
    axis: str
    step: int
    t: float
    """Seconds since the start of the run."""
    values: Mapping[str, float]
    """Values by tag; a tag names table, column, entry of a list or map, and episode."""


def create_export_folder(out: Path, *, alone: bool = True) -> None:
    """Create the directory of an export; with ``alone`` the directory must be empty, or points would be
    duplicated.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"'{out}' cannot be written: {error.strerror}; choose another --out") from error
    if alone and any(out.iterdir()):
        raise ExportError(
            f"'{out}' is not empty; an export goes into a directory of its own:"
            " remove this one to export again, or choose another with --out"
        )


def exported_types(run: RunRow) -> tuple[type[Row], ...]:
    """Return the row types that are exported of a run.

    Epochs of a training are left out, because each of its thousands of episodes would need its own tags.
    """
    return (UpdateRow, EpisodeRow) if run.iterations is not None else (EpochRow, EpisodeRow)


def points_of(row: Row, run: RunRow) -> Points:
    """Return all numbers of a row for export; the run row ``run`` names the entries of lists."""
    table, axis = TABLE_OF[type(row)], STEP_COLUMNS[type(row)]
    episode = _episode_of(row)
    values: dict[str, float] = {}
    for column in row.__struct_fields__:
        if column not in _POSITION and column != axis:
            for path, number in _numbers(column, getattr(row, column), run):
                values["/".join((table, *path, *episode))] = number
    return Points(table, axis, getattr(row, axis), row.t, values)


def wall_time(run: RunRow, t: float) -> float:
    """Return the time ``t`` seconds after the start of the run, in seconds since 1970."""
    try:
        return datetime.fromisoformat(run.started).timestamp() + t
    except (ValueError, OverflowError):
        raise ExportError(f"the run began at no time that can be read: '{run.started[:80]}'") from None


def provenance(run: RunRow) -> dict[str, Any]:
    """Return the origin of a run: versions, hardware, data and code."""
    return {name: getattr(run, name) for name in _ORIGIN}


def _episode_of(row: Row) -> tuple[str, ...]:
    """Return the tag suffix that distinguishes episodes with equal steps."""
    match row:
        case EpochRow():
            return (f"env{row.env}-episode{row.episode}",)
        case EpisodeRow():
            return (f"env{row.env}-attempt{row.attempt}" if row.attempt else f"env{row.env}",)
    return ()


def _numbers(column: str, value: object, run: RunRow) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the numbers of a column with their paths; other values are skipped."""
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
