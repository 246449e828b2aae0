"""Change the columns of telemetry rows in tests; rows are otherwise immutable."""

from typing import Any

import msgspec

from esper.leyline.rows import Row


def change(row: Row, **columns: Any) -> None:
    """Set columns of an immutable row in place."""
    for name, value in columns.items():
        msgspec.structs.force_setattr(row, name, value)
