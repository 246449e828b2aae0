"""Conversion of telemetry rows from JSON lines to Parquet, which is many times faster to read.

The Parquet folder is renamed to its final name when it is complete on disk, and only then are the JSON lines
removed: a process killed at any time leaves the JSON lines, the Parquet folder, or both. Column types of
Parquet files come from the schema and not from the rows, so all files of a table have the same types.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import duckdb

from esper.files.atomic_write import name_folder, partial_of, remove
from esper.files.row_files import RowSpan, decoding_query, parquet_path, row_files, split_lines
from esper.leyline import EsperError


class CompactionError(Exception):
    """Error: JSON lines of rows could not be converted to Parquet; the lines are kept."""


def compact(telemetry: Path, last: int) -> None:
    """Convert the JSON-lines files with file numbers up to ``last`` to Parquet."""
    try:
        found = row_files(telemetry)
        lines = [span for span in found.lines if span.last <= last]
        if lines:
            _convert(telemetry, lines)
        for span in (*found.superseded, *lines):
            remove(span.path)
    except (OSError, EsperError, duckdb.Error, UnicodeDecodeError) as error:
        raise CompactionError(f"{telemetry}: {str(error).splitlines()[0]}") from error


def _convert(telemetry: Path, lines: Sequence[RowSpan]) -> None:
    target = parquet_path(telemetry, lines[0].first, lines[-1].last)
    partial = partial_of(target)
    # DuckDB uses one thread, because the conversion runs on the thread of the training.
    settings = {"threads": "1", "async_threads": "0", "memory_limit": "1GB", "temp_directory": ""}
    try:
        partial.mkdir()
        rows: dict[str, list[bytes]] = {}
        for span in lines:
            content = span.path.read_bytes()
            if not content.endswith(b"\n"):
                raise CompactionError(f"{span.path}: its last line is not whole")
            split_lines(span.path, content, rows)
        with duckdb.connect(":memory:", config={**settings}) as database:
            for table, own in rows.items():
                if own:
                    _copy(database, own, table, partial)
        name_folder(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy(database: duckdb.DuckDBPyConnection, lines: Sequence[bytes], table: str, folder: Path) -> None:
    place = str(folder / f"{table}.parquet").replace("'", "''")
    result = database.execute(
        f"COPY ({decoding_query(table)}) TO '{place}' (FORMAT parquet, COMPRESSION zstd, USE_TMP_FILE false)",
        [[line.decode() for line in lines]],
    ).fetchone()
    if result != (len(lines),):
        raise CompactionError(f"{place}: {result} rows for {len(lines)} lines")
