"""A run's telemetry as tables in DuckDB: one view per table over all its parts, read while it is written.

Closed parts are scanned where they lie, as Parquet. What is still JSON lines is copied into memory when a
query names its table, up to the last whole line, so that no query meets a line that is being written or a
file that is about to go. Of a training that was killed, what its journals hold of the iteration in progress
stands at the end of each table. The database reads the run's own telemetry and nothing else, and writes
nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

import duckdb
import msgspec

from esper.karn.left_behind import LeftBehind, left_behind, lines_of
from esper.leyline.columns import COLUMNS
from esper.leyline.errors import UNREADABLE, EsperError, UnknownNameError
from esper.leyline.events import SCHEMA_VERSION, TABLES
from esper.leyline.factored_actions import HEAD_NAMES
from esper.leyline.run_files import list_parts

DECISIONS: Final = "decisions"
"""The table of decisions with names in the place of indices."""
VIEWS: Final = (*TABLES, DECISIONS)
"""What a query may name."""
CHUNK_BYTES: Final = 4_000_000
"""JSON lines handed to the database at once."""
LOOKS: Final = 100
"""How often in a row a part may turn into Parquet between being listed and being read."""

Stamp = tuple[int, int, int]
"""What changes with a file's content: its inode, its bytes, the time of its last change."""


class QueryError(EsperError):
    """A query that is not allowed, or cannot be answered."""


def views_named_in(text: str) -> list[str]:
    """The views whose names are words of a piece of SQL."""
    words = set(re.findall(r"\w+", text.lower()))
    return [name for name in VIEWS if name in words]


def check_statement(query: str) -> None:
    """Refuse everything but one statement that reads."""
    try:
        kinds = [statement.type for statement in duckdb.extract_statements(query)]
    except duckdb.Error as error:
        raise QueryError(f"the query is not SQL: {sentence_of(error)}") from None
    if len(kinds) != 1:
        raise QueryError(f"one statement is allowed; found {len(kinds)}")
    if kinds[0] != duckdb.StatementType.SELECT:
        raise QueryError(
            "a run is read and never changed: SELECT, WITH, DESCRIBE and SHOW are allowed;"
            f" found {kinds[0].name}"
        )


class Tables:
    """One in-memory database with the views of one run."""

    def __init__(self, telemetry: Path, *, memory: int | None = None, threads: int | None = None) -> None:
        """``memory`` is in MB; without limits the database takes what the machine has."""
        self._telemetry = telemetry.resolve()
        self._connection = _locked_database(self._telemetry, memory, threads)
        self._stamps: dict[tuple[str, str], tuple[object, ...]] = {}
        """Of the JSON lines that were copied, by the table and the name of the copy."""
        self._definitions: dict[str, str] = {}
        """The text of every view."""
        self._check_version()

    def current(self, names: Collection[str]) -> duckdb.DuckDBPyConnection:
        """The connection, after the named views were brought up to date."""
        for name in names:
            if name not in VIEWS:
                raise UnknownNameError("table", name, VIEWS)
        if DECISIONS in names:
            names = ["run", "decision", *names]
        for name in dict.fromkeys(names):
            self._refresh(name)
        return self._connection

    def ready_for(self, query: str) -> duckdb.DuckDBPyConnection:
        """The connection, up to date in what a query names; in everything if it names nothing we know."""
        return self.current(views_named_in(query) or VIEWS)

    def _check_version(self) -> None:
        for (version,) in self.current(["run"]).execute("SELECT schema_version FROM run").fetchall():
            if version != SCHEMA_VERSION:
                raise EsperError(
                    f"'{self._telemetry.parent}' was written with version {version} of the tables;"
                    f" this version of esper reads {SCHEMA_VERSION}"
                )

    def _refresh(self, name: str) -> None:
        definition = _decisions_view() if name == DECISIONS else self._view_of(name)
        if self._definitions.get(name) != definition:
            try:
                self._connection.execute(f"CREATE OR REPLACE VIEW {_quoted(name)} AS {definition}")
            except duckdb.Error as error:
                raise EsperError(f"table '{name}' cannot be read: {sentence_of(error)}") from None
            self._definitions[name] = definition

    def _view_of(self, table: str) -> str:
        for _ in range(LOOKS):
            try:
                left = left_behind(self._telemetry)
                sources = list(self._sources(table, list_parts(self._telemetry / table), left))
            except FileNotFoundError:
                continue  # it has become Parquet
            except OSError as error:
                raise EsperError(f"'{error.filename}' cannot be read: {error.strerror}") from None
            self._forget_copies(table, sources)
            return " UNION ALL ".join(f"SELECT {_names(table)} FROM {source}" for source in sources)
        raise EsperError(f"the parts in '{self._telemetry / table}' come and go; try again")

    def _sources(self, table: str, parts: dict[int, Path], left: LeftBehind) -> Iterator[str]:
        """What the view reads, in the order of the parts; nothing else than an empty table at first."""
        if not parts:
            yield f"(SELECT {_empty_row(table)} WHERE false)"
        size = left.sizes.get(table)
        for kind, group in groupby(parts.items(), key=lambda item: item[1].suffix):
            if kind == ".parquet":
                files = ", ".join(_text(str(path)) for _, path in group)
                yield f"read_parquet([{files}])"
            else:
                for number, path in group:
                    counted = size.bytes if size is not None and size.part == number else None
                    yield self._copy(table, f"{number:05d}", path, counted)
        if left.journals:
            yield self._copy_journals(table, left.journals)

    def _copy(self, table: str, name: str, part: Path, counted: int | None) -> str:
        """The whole lines of a part as a table in memory, up to so many bytes; where it stands."""
        with part.open("rb") as file:
            stamp = (*_stamp(file.fileno()), counted)
            if self._stamps.get((table, name)) != stamp:
                self._fill(table, name, part, file.read() if counted is None else file.read(counted))
                self._stamps[table, name] = stamp
        return _place(table, name)

    def _copy_journals(self, table: str, journals: Sequence[Path]) -> str:
        """All rows of a table in the journals as a table in memory; where it stands."""
        name = "journals"
        stamp = tuple(_stamp(journal) for journal in journals)
        if self._stamps.get((table, name)) != stamp:
            self._fill(table, name, journals[0].parent, lines_of(table, journals))
            self._stamps[table, name] = stamp
        return _place(table, name)

    def _fill(self, table: str, name: str, origin: Path, content: bytes) -> None:
        place = _place(table, name)
        self._stamps.pop((table, name), None)
        self._connection.execute(f"CREATE OR REPLACE TABLE {place} ({_declarations(table)})")
        insertion = (
            f"INSERT INTO {place} SELECT unnest(from_json_strict(line, {_structure(table)}))"
            " FROM (SELECT unnest(string_split(?, chr(10))) AS line)"
        )
        try:
            for chunk in _chunks_of_lines(content):
                self._connection.execute(insertion, [chunk.decode()])
        except (duckdb.Error, UnicodeDecodeError) as error:
            raise EsperError(_what_is_wrong(origin, table, content, error)) from None

    def _forget_copies(self, table: str, sources: Collection[str]) -> None:
        """Drop the copies of what is Parquet by now, or was cut off."""
        own = [key for key in self._stamps if key[0] == table]
        for key in own:
            if _place(*key) not in sources:
                self._connection.execute(f"DROP TABLE {_place(*key)}")
                del self._stamps[key]


def _stamp(file: int | Path) -> Stamp:
    status = os.stat(file)
    return (status.st_ino, status.st_size, status.st_mtime_ns)


# --- the database ---------------------------------------------------------------------------------


def _locked_database(telemetry: Path, memory: int | None, threads: int | None) -> duckdb.DuckDBPyConnection:
    """A database in memory that reads files of ``telemetry`` only, and whose settings cannot be changed."""
    settings: dict[str, str | bool | int | float | list[str]] = {
        "async_threads": 0,  # files are near, and a thread takes long to start
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "python_enable_replacements": False,  # names of Python variables are no tables
        "temp_directory": "",
    }
    if memory is not None:
        settings["memory_limit"] = f"{memory}MB"
    if threads is not None:
        settings["threads"] = threads
    connection = duckdb.connect(":memory:", config=settings)
    connection.execute("CREATE SCHEMA parts")
    connection.execute(f"SET allowed_directories = [{_text(f'{telemetry}/')}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def _chunks_of_lines(content: bytes) -> Iterator[bytes]:
    """The whole lines, many at a time; what follows the last newline is torn, or being written just now."""
    start, end = 0, content.rfind(b"\n")
    while start < end:
        stop = content.find(b"\n", min(start + CHUNK_BYTES, end))
        yield content[start:stop]
        start = stop + 1


def _what_is_wrong(part: Path, table: str, content: bytes, error: Exception) -> str:
    decoder = msgspec.json.Decoder(TABLES[table])
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            decoder.decode(line)
        except UNREADABLE as reason:
            return f"{part}, line {number}, is not a row of this table: {reason}"
    return f"{part} cannot be read: {sentence_of(error)}"


def sentence_of(error: Exception) -> str:
    """What a database's error says, without the picture of the place."""
    return " ".join(str(error).partition("\n\nLINE ")[0].split())


# --- pieces of SQL --------------------------------------------------------------------------------


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _place(table: str, name: str) -> str:
    """Of a copy. Copies stand apart, so that a list of tables shows the views alone."""
    return f"parts.{_quoted(f'{table}-{name}')}"


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _names(table: str) -> str:
    return ", ".join(_quoted(column.name) for column in COLUMNS[table])


def _declarations(table: str) -> str:
    return ", ".join(f"{_quoted(column.name)} {column.sql_type}" for column in COLUMNS[table])


def _empty_row(table: str) -> str:
    return ", ".join(f"NULL::{column.sql_type} AS {_quoted(column.name)}" for column in COLUMNS[table])


def _structure(table: str) -> str:
    """The types of a row as ``from_json`` takes them."""
    return _text(json.dumps({column.name: column.sql_type for column in COLUMNS[table]}))


def _decisions_view() -> str:
    """Decisions with the names that the run's own row gives to their indices, all by lookup in lists.

    The name of a head's choice is null where the op did not read the head.
    """
    places = ", ".join(f"list_position(heads, '{head}') AS {head}_at" for head in HEAD_NAMES)
    names = ", ".join(
        f"CASE WHEN read[{head}_at] THEN head_choices[{head}_at][action[{head}_at] + 1] END AS {head}"
        for head in HEAD_NAMES
    )
    masked = ", ".join(f"masked[{head}_at] AS {head}_masked" for head in HEAD_NAMES)
    return (
        f"WITH run_names AS (SELECT head_choices, {places} FROM run LIMIT 1)"
        f" SELECT decision.t, env, episode, epoch, {names}, op_probs[action[op_at] + 1] AS op_probability,"
        " succeeded, forced, refused_by, failed_checks, value, reward, reward_terms,"
        f" {masked} FROM decision LEFT JOIN run_names ON true"
    )
