"""Column specifications of every telemetry table, derived from the row types.

Writers, SQL, axis labels and documentation all use the column specifications. Names and types of columns come
from the Structs in ``rows.py``. Unit, meaning and normal range of a column come from the ``Column`` in the
annotation of its field.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from esper.leyline.rows import TABLES, Column, Row

_FLAT_NAMES: Final[Mapping[object, tuple[str, str]]] = {
    int: ("integer", "BIGINT"),
    float: ("number", "DOUBLE"),
    str: ("text", "VARCHAR"),
    bool: ("flag", "BOOLEAN"),
    Any: ("anything", "JSON"),
}
"""For each Python type: its name in the documentation, and its SQL type."""


LISTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("action", "read", "masked", "log_probs", "head_entropy", "head_grad_norm"), "heads"),
    **dict.fromkeys(("op_probs", "op_shares", "op_counts"), "ops"),
    "on": "slots",
}
"""Columns with one entry per head, op or slot, and the column of the run row that has their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSpec(Column):
    """Specification of one column of a telemetry table."""

    name: str
    type_name: str
    """Type of the column in the documentation, such as number, text or list of flags."""
    sql_type: str
    """Type of the column in DuckDB; entries of lists and maps may be null."""
    may_be_unknown: bool
    """Whether the column may be null; null means that the value was not measured."""
    is_float: bool
    nests_floats: bool
    """Whether values of the column are lists or maps that may contain floats."""


def columns_of(table: str, row_type: type[Row]) -> tuple[ColumnSpec, ...]:
    """Return the specifications of all columns of a row type, in the order in which a row is written."""
    hints = get_type_hints(row_type, include_extras=True)
    return tuple(_column(table, name, hints[name]) for name in row_type.__struct_fields__)


def _column(table: str, name: str, hint: object) -> ColumnSpec:
    notes = [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Column)]
    if get_origin(hint) is not Annotated or len(notes) != 1:
        raise RuntimeError(f"column '{name}' of table '{table}' needs exactly one Column(unit, meaning)")
    known, may_be_unknown = _split_unknown(get_args(hint)[0])
    type_name, sql_type, holds_floats = _described(known)
    return ColumnSpec(
        **asdict(notes[0]),
        name=name,
        type_name=type_name,
        sql_type=sql_type,
        may_be_unknown=may_be_unknown,
        is_float=known is float,
        nests_floats=known is not float and holds_floats,
    )


def _split_unknown(declared: Any) -> tuple[Any, bool]:
    """Return a declared type without None, and whether None was one of its alternatives."""
    if get_origin(declared) not in (Union, UnionType):
        return declared, False
    members = [member for member in get_args(declared) if member is not NoneType]
    if len(members) != 1:
        raise RuntimeError(f"a column holds one type, or that type and None; found {declared}")
    return members[0], True


def _described(declared: Any) -> tuple[str, str, bool]:
    """Return documentation name and SQL type of a Python type, and whether its values may contain floats."""
    known, may_be_unknown = _split_unknown(declared)
    kind = get_origin(known)
    if kind in (list, dict):
        names, sql_types, floats = zip(*map(_described, get_args(known)), strict=True)
        if kind is list:
            name, sql_type = f"list of {names[0]}", f"{sql_types[0]}[]"
        else:
            name = f"map of {names[0]} to {names[1]}"
            sql_type = "JSON" if Any in get_args(known) else f"MAP({', '.join(sql_types)})"
        holds_floats = any(floats)
    else:
        flat = str if kind is Literal else known
        if flat not in _FLAT_NAMES:
            raise RuntimeError(f"a column holds flat values, lists and maps of them; found {declared}")
        name, sql_type = _FLAT_NAMES[flat]
        holds_floats = flat in (float, Any)
    return name + (" or null" if may_be_unknown else ""), sql_type, holds_floats


COLUMNS: Final[Mapping[str, tuple[ColumnSpec, ...]]] = {
    table: columns_of(table, row_type) for table, row_type in TABLES.items()
}
"""Column specifications of each telemetry table, by the name of the table."""
TABLE_OF: Final[Mapping[type[Row], str]] = {row: table for table, row in TABLES.items()}
"""Name of the telemetry table of each row type."""
