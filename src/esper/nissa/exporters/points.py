"""Conversion of a telemetry row to points for export: numbers with tags and a step axis.

All exporters (TensorBoard, Trackio, Weights & Biases) write the same points. All points of one telemetry
table share a step axis, such as the iteration. A value of ``None`` is not exported, so that an unknown value
is a gap and not 0.
"""

from collections.abc import Mapping
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

from esper.files.atomic_write import make_folder, save_errors
from esper.files.row_files import check_outside_runs
from esper.leyline import EpisodeRow, EpochRow, EsperError, Row, RunRow, UpdateRow
from esper.leyline.columns import LISTS, TABLE_OF

STEP_COLUMNS: Final = {UpdateRow: "iteration", EpisodeRow: "episode", EpochRow: "epoch"}
"""Row types that can be exported, with the column of their step axis."""
_POSITION: Final = {"t", "env", "episode", "attempt", "iteration"}
_ORIGIN: Final = ("name", "started", "schema_version", "data_hash", "git_revision", "versions", "hardware")


class ExportError(EsperError):
    """Error: a run cannot be exported as the user requested."""


class Points(NamedTuple):
    """Numbers of one telemetry row for export, with their step and time."""

    table: str
    axis: str
    step: int
    t: float
    """Time of the row in seconds since the start of the run."""
    values: Mapping[str, float]
    """Numbers by tag; a tag joins table, column, entry of a list or map, and environment and episode."""


def create_export_folder(out: Path, *, alone: bool = True) -> None:
    """Create the directory of an export; if ``alone`` is true, refuse a directory that is not empty, because
    a second export would duplicate points.
    """
    check_outside_runs(out)
    with save_errors(out, ExportError, remedy="; choose another --out"):
        make_folder(out)
    if alone and any(out.iterdir()):
        raise ExportError(
            f"'{out}' is not empty; an export goes into a directory of its own:"
            " remove this one to export again, or choose another with --out"
        )


def import_package(name: str) -> Any:
    """Import the package of a tool; raise ``ExportError`` with the install command if it is missing."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ExportError(f"the package '{name}' is not installed; get it by: pip install {name}") from None


def exported_types(run: RunRow) -> tuple[type[Row], ...]:
    """Return the types of telemetry rows that are exported for a run.

    Epoch rows of a policy training are left out, because each of its thousands of episodes would need
    separate tags.
    """
    return (UpdateRow, EpisodeRow) if run.iterations is not None else (EpochRow, EpisodeRow)


def points_of(row: Row, run: RunRow) -> Points:
    """Return all numbers of a row for export; the run row ``run`` has the names of the entries of lists."""
    table, axis = TABLE_OF[type(row)], STEP_COLUMNS[type(row)]
    episode = _episode_of(row)
    values: dict[str, float] = {}
    for column in row.__struct_fields__:
        if column not in _POSITION and column != axis:
            for path, value in _entries(column, getattr(row, column), run).items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    values["/".join((table, *path, *episode))] = value
    return Points(table, axis, getattr(row, axis), row.t, values)


def wall_time(run: RunRow, t: float) -> float:
    """Return the wall-clock time ``t`` seconds after the start of the run, in seconds since 1970."""
    try:
        return datetime.fromisoformat(run.started).timestamp() + t
    except (ValueError, OverflowError):
        raise ExportError(f"the run began at no time that can be read: '{run.started[:80]}'") from None


def provenance(run: RunRow) -> dict[str, Any]:
    """Return the origin of a run: versions, hardware, data and code."""
    return {name: getattr(run, name) for name in _ORIGIN}


def _episode_of(row: Row) -> tuple[str, ...]:
    """Return the end of a row's tags, which distinguishes rows of two episodes with the same step."""
    match row:
        case EpochRow():
            return (f"env{row.env}-episode{row.episode}",)
        case EpisodeRow():
            return (f"env{row.env}-attempt{row.attempt}" if row.attempt else f"env{row.env}",)
    return ()


def _entries(column: str, value: object, run: RunRow) -> dict[tuple[str, ...], object]:
    """Return the value of a column, or the entries of a list or map, by path (column, entry)."""
    if isinstance(value, list) and column in LISTS:
        value = _named(column, value, run)
    if isinstance(value, dict):
        return {(column, name): entry for name, entry in value.items()}
    return {(column,): value}


def _named(column: str, entries: list[Any], run: RunRow) -> dict[str, Any]:
    names = getattr(run, LISTS[column])
    if len(names) != len(entries):
        raise ExportError(
            f"column '{column}' holds {len(entries)} entries where the run names {len(names)}"
            f" {LISTS[column]}; its telemetry is damaged"
        )
    return dict(zip(names, entries, strict=True))
