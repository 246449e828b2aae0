"""The columns of every table, derived from the row types: what writers, SQL, axis labels and docs share.

Nothing here is a second list to keep up to date: names and types are the Structs' own, units, meanings
and bands stand beside them as ``Column``, and a column without one stops the import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from esper.leyline.events import TABLES, Column, Row

_PLAIN_NAMES: Final[Mapping[object, tuple[str, str]]] = MappingProxyType(
    {
        int: ("integer", "BIGINT"),
        float: ("number", "DOUBLE"),
        str: ("text", "VARCHAR"),
        bool: ("flag", "BOOLEAN"),
        Any: ("anything", "JSON"),
    }
)
"""What each flat type is called in words and in SQL."""


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One column as writers, queries, axis labels and documentation see it."""

    name: str
    type_name: str
    """The type in words: number, text, list of flags ..."""
    sql_type: str
    """The type in DuckDB, the same in every part of a table; entries of lists and maps may be null."""
    may_be_unknown: bool
    """null is allowed, and means that nobody measured it."""
    unit: str
    meaning: str
    low: float | None
    high: float | None
    """Edges of the healthy band; None: open."""
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
        sql_type=_sql_type(known),
        may_be_unknown=may_be_unknown,
        unit=notes[0].unit,
        meaning=notes[0].meaning,
        low=notes[0].low,
        high=notes[0].high,
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
    return _plain(declared)[0]


def _inner_name(declared: Any) -> str:
    """The type of what stands in a list or a map, where single entries may be unknown."""
    known, may_be_unknown = _split_unknown(declared)
    return _type_name(known) + (" or null" if may_be_unknown else "")


def _sql_type(declared: Any) -> str:
    declared, _ = _split_unknown(declared)
    origin, arguments = get_origin(declared), get_args(declared)
    if origin is list:
        return f"{_sql_type(arguments[0])}[]"
    if origin is dict and Any in arguments:
        return "JSON"  # a map of mixed values
    if origin is dict:
        return f"MAP({_sql_type(arguments[0])}, {_sql_type(arguments[1])})"
    return _plain(declared)[1]


def _plain(declared: Any) -> tuple[str, str]:
    if get_origin(declared) is Literal:
        return _PLAIN_NAMES[str]
    if declared not in _PLAIN_NAMES:
        raise RuntimeError(
            f"a column cannot hold {declared}; allowed are flat values, lists and maps of them"
        )
    return _PLAIN_NAMES[declared]


COLUMNS: Final[Mapping[str, tuple[ColumnSpec, ...]]] = MappingProxyType(
    {table: columns_of(table, row_type) for table, row_type in TABLES.items()}
)
"""The columns of every table."""
TABLE_OF: Final[Mapping[type[Row], str]] = MappingProxyType({row: table for table, row in TABLES.items()})
"""The table that a row belongs to, by its type."""
