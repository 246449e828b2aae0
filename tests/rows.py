"""Rows are values; those that tests make up are bent into shape before anybody has seen them."""

from typing import Any

import msgspec

from esper.leyline.rows import Row


def change(row: Row, **columns: Any) -> None:
    """Set columns of a made-up row where it stands."""
    for name, value in columns.items():
        msgspec.structs.force_setattr(row, name, value)
