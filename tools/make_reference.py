"""Write the reference pages of the documentation from the code: ``python -m tools.make_reference``.

``docs/metrics.md`` lists the columns of every telemetry table, ``docs/alerts.md`` the alert rules. Tests
compare ``docs/metrics.md`` and ``docs/alerts.md`` with the output of this module.
"""

import inspect
from pathlib import Path

from esper.leyline.columns import COLUMNS, TABLE_OF, ColumnSpec
from esper.leyline.rows import (
    SCHEMA_VERSION,
    TABLES,
    UNIT_RANGES,
    EpisodeRow,
    ResourceRow,
    SeedRow,
    UpdateRow,
)
from esper.nissa.alert_rules import GOVERNOR_RULES, RULES, Rule

DOCS = Path(__file__).resolve().parents[1] / "docs"
UNITS = {UpdateRow: "update", EpisodeRow: "episode", SeedRow: "epoch", ResourceRow: "resource row"}
"""Unit in which the delay of an alert rule is counted; the key is the row type that the rule reads."""
METRICS = """\
# What a run records

Written by `python -m tools.make_reference` from the row types in
`src/esper/leyline/rows.py`; a test keeps the two equal.

A run's directory holds its rows in `telemetry/`: `rows-00000.jsonl` and so on, one JSON object
per line that starts with the name of its table, and folders such as `rows-00000-00040` with one
Parquet file per table. `null` means unknown, never 0, and occurs only in columns whose type includes
it. A value outside its healthy band deserves a look.
"""
ALERTS = """\
# What raises an alert

Written by `python -m tools.make_reference` from the table in
`src/esper/nissa/alert_rules.py`, with the limits of `src/esper/leyline/thresholds.py`; a test keeps the
two equal.

An alert writes one row to the table `alert` when its condition starts and one when it ends, for each
scope: the run, a head, or a slot of an environment. The delay is the number of rows of the rule's
table from the first violation to the alert. An unknown value neither raises nor clears an alert.

| rule | severity | table | raised when | delay | what to do |
|---|---|---|---|---|---|
{rules}

## Interventions of the governor

The engine raises these errors itself, in the epoch in which it rolls back or prunes; the hint names
the action taken. They are cleared when the episode ends.

| rule | raised when |
|---|---|
{interventions}
"""


def metrics_markdown() -> str:
    ranges = [f"A {unit} lies between {low:g} and {high:g}.\n" for unit, (low, high) in UNIT_RANGES.items()]
    version = f"This is version {SCHEMA_VERSION} of the schema, the `schema_version` of a run.\n"
    return "".join([METRICS, *ranges, version, *map(_section, COLUMNS)])


def _section(table: str) -> str:
    lines = ["", f"## {table}", "", inspect.cleandoc(TABLES[table].__doc__ or ""), ""]
    lines += ["| column | type | unit | healthy | meaning |", "|---|---|---|---|---|"]
    for column in COLUMNS[table]:
        type_name = column.type_name + (" or null" if column.may_be_unknown else "")
        lines.append(f"| `{column.name}` | {type_name} | {column.unit} | {band(column)} | {column.meaning} |")
    return "\n".join(lines) + "\n"


def band(column: ColumnSpec) -> str:
    """Return the normal range of a column in words, such as "0 to 1"; empty if the column has no range."""
    low, high = column.low, column.high
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    if low is not None:
        return f"≥ {low:g}"
    return "" if high is None else f"≤ {high:g}"


def alerts_markdown() -> str:
    interventions = (f"| `{name}` | {meaning} |" for name, meaning in GOVERNOR_RULES.items())
    return ALERTS.format(rules="\n".join(map(_line, RULES)), interventions="\n".join(interventions))


def _line(rule: Rule) -> str:
    times = f", {rule.times} times in a row" if rule.times > 1 else ""
    unit = UNITS[rule.table] + ("" if rule.delay == 1 else "s")
    cells = (f"`{rule.name}`", rule.severity, f"`{TABLE_OF[rule.table]}`", rule.condition + times)
    return f"| {' | '.join(cells)} | within {rule.delay} {unit} | {rule.hint} |"


if __name__ == "__main__":
    (DOCS / "metrics.md").write_text(metrics_markdown(), encoding="utf-8")
    (DOCS / "alerts.md").write_text(alerts_markdown(), encoding="utf-8")
