"""Reads a run's rows back from its directory, while it is being written or long after."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar, overload

import msgspec

from esper.leyline.errors import EsperError, UnknownNameError
from esper.leyline.events import TABLES, Row

R = TypeVar("R", bound=Row)


@overload
def read_rows(run_dir: Path | str, table: type[R]) -> list[R]: ...


@overload
def read_rows(run_dir: Path | str, table: str) -> list[Row]: ...


def read_rows(run_dir: Path | str, table: type[Row] | str) -> Sequence[Row]:
    """All rows of a table, by its row type or its name, oldest first; empty when the run wrote none."""
    name, row_type = _find_table(table)
    telemetry = _telemetry_of(Path(run_dir))
    decoder = msgspec.json.Decoder(row_type)
    rows: list[Row] = []
    for part in sorted((telemetry / name).glob("part-*.jsonl")):
        rows += _decode_part(part, decoder)
    return rows


def _find_table(table: type[Row] | str) -> tuple[str, type[Row]]:
    for name, row_type in TABLES.items():
        if table in (name, row_type):
            return name, row_type
    if isinstance(table, str):
        raise UnknownNameError("table", table, TABLES)
    raise UnknownNameError("row type", table.__name__, (listed.__name__ for listed in TABLES.values()))


def _telemetry_of(run_dir: Path) -> Path:
    if not run_dir.is_dir():
        raise EsperError(f"there is no run directory '{run_dir}'")
    telemetry = run_dir / "telemetry"
    if not telemetry.is_dir():
        raise EsperError(f"'{run_dir}' is not a run's directory: it holds no folder 'telemetry'")
    return telemetry


def _decode_part(part: Path, decoder: msgspec.json.Decoder[R]) -> list[R]:
    *lines, unfinished = part.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise EsperError(f"{part}, line {number}, is not a row of this table: {error}") from error
    # What follows the last newline is empty, or torn: its writer was killed or is at it just now.
    with contextlib.suppress(msgspec.DecodeError):
        rows.append(decoder.decode(unfinished))
    return rows
