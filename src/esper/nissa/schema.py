"""The reference of what a run records: ``python -m esper.nissa.schema > docs/metrics.md``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator

from esper.leyline.columns import COLUMNS, ColumnSpec
from esper.leyline.events import SCHEMA_VERSION, TABLES, UNIT_RANGES


def metrics_markdown() -> str:
    """The reference of all tables and columns, as Markdown."""
    return "\n".join(_markdown_lines()) + "\n"


def _markdown_lines() -> Iterator[str]:
    yield "# What a run records"
    yield ""
    yield "Made by `python -m esper.nissa.schema > docs/metrics.md` from the row types in"
    yield "`src/esper/leyline/events.py`; a test keeps the two equal."
    yield ""
    yield "A run's directory holds its rows in `telemetry/`: `rows-00000.jsonl` and so on, one JSON object"
    yield "per line, which begins with the name of its table, and folders such as `rows-00000-00040` with one"
    yield "Parquet file per table. `null` means unknown and is possible only where the type says so; it never"
    yield "stands for 0. A value outside its healthy band deserves a look."
    for unit, (low, high) in UNIT_RANGES.items():
        yield f"A {unit} lies between {low:g} and {high:g}."
    yield f"This is version {SCHEMA_VERSION} of the schema, the `schema_version` of a run."
    for table, columns in COLUMNS.items():
        yield ""
        yield f"## {table}"
        yield ""
        yield inspect.cleandoc(TABLES[table].__doc__ or "")
        yield ""
        yield "| column | type | unit | healthy | meaning |"
        yield "|---|---|---|---|---|"
        for column in columns:
            type_name = column.type_name + (" or null" if column.may_be_unknown else "")
            yield f"| `{column.name}` | {type_name} | {column.unit} | {band(column)} | {column.meaning} |"


def band(column: ColumnSpec) -> str:
    """The healthy band of a column in words; nothing where it has none."""
    low, high = column.low, column.high
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    if low is not None:
        return f"≥ {low:g}"
    return "" if high is None else f"≤ {high:g}"


if __name__ == "__main__":
    sys.stdout.write(metrics_markdown())
