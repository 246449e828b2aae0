"""Turns a table's closed parts from JSON lines into Parquet, which is read many times faster.

The Parquet file gets its name when it is whole and on the disk, and only then the lines are removed: a
process killed at any moment leaves the lines, or both, or Parquet. Types come from the schema and never
from the rows, so that all parts of a table agree.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import duckdb

from esper.leyline.columns import COLUMNS
from esper.leyline.run_files import part_files, part_path


class CompactionError(Exception):
    """A part that could not be turned into Parquet; its lines are still there."""


class Compactor:
    """Keeps the database that converts; it comes into being with the first part."""

    def __init__(self) -> None:
        self._database: duckdb.DuckDBPyConnection | None = None

    def compact(self, folder: Path, table: str, below: int) -> None:
        """Convert what is still JSON lines of the parts with numbers lower than ``below``, oldest first."""
        try:
            for number, lines in part_files(folder):
                if number < below and lines.suffix == ".jsonl":
                    target = part_path(folder, number, "parquet")
                    if not target.exists():
                        self._convert(lines, table, target)
                    lines.unlink()
        except (OSError, duckdb.Error) as error:
            raise CompactionError(f"{folder}: {str(error).splitlines()[0]}") from error

    def _convert(self, lines: Path, table: str, target: Path) -> None:
        partial = target.with_name(target.name + ".partial")
        try:
            written = self._copy(lines, table, partial)
            expected = _count_of_lines(lines)
            if written != expected:
                raise CompactionError(f"{lines}: {written} rows for {expected} whole lines")
            _flush_to_disk(partial)
            os.replace(partial, target)
            _flush_to_disk(target.parent)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()

    def _copy(self, lines: Path, table: str, partial: Path) -> int:
        """Write the rows of ``lines`` to ``partial``; how many there were."""
        if self._database is None:
            # On the trainer's own thread: none is started.
            settings = {"threads": "1", "async_threads": "0", "memory_limit": "1GB", "temp_directory": ""}
            self._database = duckdb.connect(":memory:", config={**settings})
        columns = ", ".join(f"{_text(column.name)}: {_text(column.sql_type)}" for column in COLUMNS[table])
        rows = f"read_json({_text(str(lines))}, format = 'newline_delimited', columns = {{{columns}}})"
        options = "FORMAT parquet, COMPRESSION zstd, USE_TMP_FILE false"
        result = self._database.execute(f"COPY (FROM {rows}) TO {_text(str(partial))} ({options})").fetchone()
        assert result is not None
        return int(result[0])


def _count_of_lines(lines: Path) -> int:
    """Of whole ones: a torn one at the end is not counted, and must not be converted."""
    return lines.read_bytes().count(b"\n")


def _flush_to_disk(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
