"""Reads a run's rows back from its directory, while it is being written or long after."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TypeVar

import msgspec

from esper.leyline.errors import EsperError, UnknownNameError
from esper.leyline.events import TABLES, Row

R = TypeVar("R", bound=Row)


def read_rows(run_dir: Path, table: str) -> list[Row]:
    """All rows of a table by its name, oldest first; empty when the run wrote none."""
    row_type = TABLES.get(table)
    if row_type is None:
        raise UnknownNameError("table", table, TABLES)
    return list(read_table(run_dir, row_type))


def read_table(run_dir: Path, row_type: type[R]) -> list[R]:
    """All rows of a table by its row type, oldest first; empty when the run wrote none."""
    table = next((name for name, listed in TABLES.items() if listed is row_type), None)
    if table is None:
        raise UnknownNameError("row type", row_type.__name__, (listed.__name__ for listed in TABLES.values()))
    telemetry = _telemetry_of(run_dir)
    decoder = msgspec.json.Decoder(row_type)
    rows: list[R] = []
    for part in sorted((telemetry / table).glob("part-*.jsonl")):
        rows += _decode_part(part, decoder)
    return rows


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
