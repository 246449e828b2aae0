"""``esper sql RUN "select …"``: SQL query on the tables of a run, printed as a table, JSON or CSV."""

import csv
import json
import os
import sys
import threading
from collections.abc import Sequence

import msgspec
from pydantic import Field
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.karn import notation
from esper.karn.run import SqlAnswer, answer_query, open_run
from esper.leyline import EsperError, notify, printable
from esper.run.run_config import Settings
from esper.scripts.flags import parse_words
from esper.scripts.guard import USAGE_ERROR

PROGRAM = 'esper sql RUN "select …"'
NUMBERS = ("BIGINT", "DOUBLE", "INTEGER", "HUGEINT", "FLOAT", "DECIMAL", "UBIGINT")
SECONDS = 60.0
MAX_LINES = 100
"""Default largest number of rows in a printed result of a query."""


class SqlConfig(Settings):
    """Query the tables of a run (see docs/metrics.md) and the view 'decisions', which has names in place of
    indices."""

    limit: int | None = Field(
        None,
        ge=1,
        le=1_000_000_000,
        description=f"Most rows to print. Unless given, a table has {MAX_LINES}; JSON and CSV have all.",
    )
    as_json: bool = False
    """Print columns, types and rows as JSON."""
    as_csv: bool = False
    """Print comma-separated values, with the column names in the first line."""


def sql_command(args: Sequence[str]) -> None:
    needed = 'a run and a query, such as runs/mine "select count(*) from epoch"'
    (run_dir, query), config = parse_words(SqlConfig, PROGRAM, args, count=2, needed=needed)
    if config.as_json and config.as_csv:
        raise EsperError("--json and --csv are two ways to print one answer; choose one of them")
    is_for_people = not (config.as_json or config.as_csv)
    most = MAX_LINES if config.limit is None and is_for_people else config.limit
    timer = threading.Timer(SECONDS, _give_up)
    timer.daemon = True
    timer.start()
    try:
        found = answer_query(open_run(run_dir).path, query, most)
    finally:
        timer.cancel()
        timer.join()  # duckdb prints warnings if a thread is still alive at exit.
    _print_answer(found, config)


def _give_up() -> None:
    """End the process at the time limit of a query; some database operations cannot be interrupted."""
    notify(f"the query took longer than {SECONDS:g} s; ask for less")
    os._exit(USAGE_ERROR)


def _print_answer(found: SqlAnswer, config: SqlConfig) -> None:
    if config.as_json:
        print(json.dumps(msgspec.structs.asdict(found)))
    elif config.as_csv:
        lines = csv.writer(sys.stdout, lineterminator="\n")
        for row in (found.columns, *found.rows):
            lines.writerow(map(_csv_cell, row))
    else:
        _print_for_people(found, Console())
    if found.note:
        notify(f"{found.note}; --limit sets how many")


def _csv_cell(value: object) -> object:
    """Return a value for the CSV writer; text for a terminal is escaped, text for a file is not."""
    if isinstance(value, list | dict):
        return json.dumps(value)
    return printable(value) if isinstance(value, str) and sys.stdout.isatty() else value


def _print_for_people(found: SqlAnswer, console: Console) -> None:
    """Print the result of a query as a table if it fits the console, otherwise as one block per row."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name, kind in zip(found.columns, found.types, strict=True):
        table.add_column(_text(name), justify="right" if kind.startswith(NUMBERS) else "left")
    for row in found.rows:
        table.add_row(*map(_text, row))
    # A console of 100,000 columns wraps no line, so the table is measured at its full width.
    natural = Console(width=100_000).measure(table)
    if natural.maximum <= console.width:
        console.print(table)
        return
    for number, row in enumerate(found.rows, start=1):
        console.rule(Text(f"row {number}"), align="left")
        record = Table.grid(padding=(0, 2))
        for name, value in zip(found.columns, row, strict=True):
            record.add_row(_text(name), _text(value))
        console.print(record)


def _text(value: object) -> Text:
    return Text(printable(notation.cell(value)))
