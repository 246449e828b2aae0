"""The columns of every table, derived from the row types of leyline.

Nothing here is a second list to keep up to date: names and types are the Structs' own, units and
meanings stand beside them as ``Column``, and a column without one stops the import.
``python -m esper.nissa.schema > docs/metrics.md`` writes the reference that users read.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from esper.leyline.events import SCHEMA_VERSION, TABLES, Column, Row

_PLAIN_NAMES: Final[Mapping[object, str]] = MappingProxyType(
    {int: "integer", float: "number", str: "text", bool: "flag", Any: "anything"}
)


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One column as writers, axis labels and documentation see it."""

    name: str
    type_name: str
    """The type in words: number, text, list of flags ..."""
    may_be_unknown: bool
    """null is allowed, and means that nobody measured it."""
    unit: str
    meaning: str
    is_float: bool
    nests_floats: bool
    """The value is a list or a map in which a float may stand."""


def columns_of(table: str, row_type: type[Row]) -> tuple[ColumnSpec, ...]:
    """The columns of one row type, in the order in which they are written."""
    hints = get_type_hints(row_type, include_extras=True)
    return tuple(_column(table, name, hints[name]) for name in row_type.__struct_fields__)


def _column(table: str, name: str, hint: object) -> ColumnSpec:
    notes = [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Column)]
    if get_origin(hint) is not Annotated or len(notes) != 1:
        raise RuntimeError(f"column '{name}' of table '{table}' needs exactly one Column(unit, meaning)")
    declared = get_args(hint)[0]
    known, may_be_unknown = _split_unknown(declared)
    return ColumnSpec(
        name=name,
        type_name=_type_name(known),
        may_be_unknown=may_be_unknown,
        unit=notes[0].unit,
        meaning=notes[0].meaning,
        is_float=known is float,
        nests_floats=known is not float and bool({float, Any} & _leaves(known)),
    )


def _split_unknown(declared: Any) -> tuple[Any, bool]:
    """The type without None, and whether None was part of it."""
    if get_origin(declared) not in (Union, UnionType):
        return declared, False
    members = [member for member in get_args(declared) if member is not NoneType]
    if len(members) != 1:
        raise RuntimeError(f"a column holds one type, or that type and None; found {declared}")
    return members[0], True


def _leaves(declared: Any) -> set[Any]:
    """The flat types that a type is made of."""
    declared, _ = _split_unknown(declared)
    if get_origin(declared) in (list, dict):
        return set().union(*(_leaves(argument) for argument in get_args(declared)))
    return {declared}


def _type_name(declared: Any) -> str:
    origin, arguments = get_origin(declared), get_args(declared)
    if origin is list:
        return f"list of {_inner_name(arguments[0])}"
    if origin is dict:
        return f"map of {_inner_name(arguments[0])} to {_inner_name(arguments[1])}"
    if origin is Literal:
        return "text"
    if declared not in _PLAIN_NAMES:
        raise RuntimeError(
            f"a column cannot hold {declared}; allowed are flat values, lists and maps of them"
        )
    return _PLAIN_NAMES[declared]


def _inner_name(declared: Any) -> str:
    """The type of what stands in a list or a map, where single entries may be unknown."""
    known, may_be_unknown = _split_unknown(declared)
    return _type_name(known) + (" or null" if may_be_unknown else "")


COLUMNS: Final[Mapping[str, tuple[ColumnSpec, ...]]] = MappingProxyType(
    {table: columns_of(table, row_type) for table, row_type in TABLES.items()}
)
"""The columns of every table."""
TABLE_OF: Final[Mapping[type[Row], str]] = MappingProxyType({row: table for table, row in TABLES.items()})
"""The table that a row belongs to, by its type."""


def metrics_markdown() -> str:
    """The reference of all tables and columns, as Markdown."""
    return "\n".join(_markdown_lines()) + "\n"


def _markdown_lines() -> Iterator[str]:
    yield "# What a run records"
    yield ""
    yield "Made by `python -m esper.nissa.schema > docs/metrics.md` from the row types in"
    yield "`src/esper/leyline/events.py`; a test keeps the two equal."
    yield ""
    yield "A run's directory holds one folder per table, `telemetry/<table>/`, with parts of one JSON object"
    yield "per line. `null` means unknown and is possible only where the type says so; it never stands for 0."
    yield f"This is version {SCHEMA_VERSION} of the schema, the `schema_version` of a run."
    for table, columns in COLUMNS.items():
        yield ""
        yield f"## {table}"
        yield ""
        yield inspect.cleandoc(TABLES[table].__doc__ or "")
        yield ""
        yield "| column | type | unit | meaning |"
        yield "|---|---|---|---|"
        for column in columns:
            type_name = column.type_name + (" or null" if column.may_be_unknown else "")
            yield f"| `{column.name}` | {type_name} | {column.unit} | {column.meaning} |"


if __name__ == "__main__":
    sys.stdout.write(metrics_markdown())
