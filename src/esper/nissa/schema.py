"""The reference of what a run records: ``python -m esper.nissa.schema > docs/metrics.md``."""

import inspect
import sys
from typing import Final

from esper.leyline.columns import COLUMNS, ColumnSpec
from esper.leyline.rows import SCHEMA_VERSION, TABLES, UNIT_RANGES

_HEADER: Final = """\
# What a run records

Made by `python -m esper.nissa.schema > docs/metrics.md` from the row types in
`src/esper/leyline/rows.py`; a test keeps the two equal.

A run's directory holds its rows in `telemetry/`: `rows-00000.jsonl` and so on, one JSON object
per line, which begins with the name of its table, and folders such as `rows-00000-00040` with one
Parquet file per table. `null` means unknown and is possible only where the type says so; it never
stands for 0. A value outside its healthy band deserves a look.
"""


def metrics_markdown() -> str:
    ranges = [f"A {unit} lies between {low:g} and {high:g}.\n" for unit, (low, high) in UNIT_RANGES.items()]
    version = f"This is version {SCHEMA_VERSION} of the schema, the `schema_version` of a run.\n"
    return "".join([_HEADER, *ranges, version, *map(_section, COLUMNS)])


def _section(table: str) -> str:
    lines = ["", f"## {table}", "", inspect.cleandoc(TABLES[table].__doc__ or ""), ""]
    lines += ["| column | type | unit | healthy | meaning |", "|---|---|---|---|---|"]
    for column in COLUMNS[table]:
        type_name = column.type_name + (" or null" if column.may_be_unknown else "")
        lines.append(f"| `{column.name}` | {type_name} | {column.unit} | {band(column)} | {column.meaning} |")
    return "\n".join(lines) + "\n"


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
