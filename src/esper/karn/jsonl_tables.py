"""In-memory DuckDB tables with the rows of a run that are still JSON lines."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import duckdb
import msgspec

from esper.files.row_files import split_lines
from esper.leyline.columns import COLUMNS
from esper.leyline.errors import UNREADABLE, EsperError
from esper.leyline.rows import TABLES

Stamp = tuple[int, int, int]
"""Inode, size and modification time of a file, which change with its content."""


class JsonlTables:
    """Tables with the JSON rows of a run, one per table, created on first use."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection
        self._stamps: dict[Path, Stamp] = {}
        """Stamps of the files that were read, in reading order."""
        self._lines: dict[str, list[bytes]] = {}
        """Lines read but not yet inserted, by table."""
        self._tables: set[str] = set()
        """Names of the tables that exist in the database."""
        connection.execute("CREATE SCHEMA lines")

    def read(self, files: Sequence[Path]) -> None:
        """Read the complete lines of these files in order; raises ``OSError``."""
        stamps = [(path, _stamp(path)) for path in files]
        if stamps[: len(self._stamps)] != list(self._stamps.items()):
            self._forget()
        for path, stamp in stamps[len(self._stamps) :]:
            split_lines(path, path.read_bytes(), self._lines)
            self._stamps[path] = stamp

    def _forget(self) -> None:
        for table in self._tables:
            self._connection.execute(f"DROP TABLE {_table_name(table)}")
        self._tables.clear()
        self._lines.clear()
        self._stamps.clear()

    def table(self, name: str) -> str:
        """Insert the pending lines of a table and return its qualified name in the database."""
        if name not in self._tables:
            columns = ", ".join(f"{quoted(column.name)} {column.sql_type}" for column in COLUMNS[name])
            self._connection.execute(f"CREATE TABLE {_table_name(name)} ({columns})")
            self._tables.add(name)
        structure = json.dumps({column.name: column.sql_type for column in COLUMNS[name]})
        insertion = (
            f"INSERT INTO {_table_name(name)} SELECT unnest(from_json_strict(line, '{structure}'))"
            " FROM (SELECT unnest(?::VARCHAR[]) AS line)"
        )
        try:
            if lines := self._lines.pop(name, None):
                self._connection.execute(insertion, [[line.decode() for line in lines]])
        except (duckdb.Error, UnicodeDecodeError) as error:
            raise EsperError(_bad_line_error(list(self._stamps), name, error)) from None
        return _table_name(name)


def _stamp(path: Path) -> Stamp:
    status = os.stat(path)
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def _bad_line_error(files: Sequence[Path], table: str, error: Exception) -> str:
    """Return an error message that names the first line that is not a row of the table."""
    decoder = msgspec.json.Decoder(TABLES[table])
    begin = f'{{"table":"{table}",'.encode()
    for path in files:
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
            try:
                if line.startswith(begin):
                    decoder.decode(line)
            except UNREADABLE as reason:
                return f"{path}, line {number}, is not a row of table '{table}': {reason}"
    return f"table '{table}' cannot be read: {error_text(error)}"


def error_text(error: Exception) -> str:
    """Return the message of a DuckDB error without the excerpt of the query."""
    return " ".join(str(error).partition("\n\nLINE ")[0].split())


def quoted(name: str) -> str:
    """Quote an identifier for SQL."""
    return '"' + name.replace('"', '""') + '"'


def _table_name(table: str) -> str:
    """Return the qualified name; a schema other than main hides these tables from SHOW TABLES."""
    return f"lines.{quoted(table)}"
