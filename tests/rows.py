"""Change columns of telemetry rows, which are otherwise immutable, in tests."""

from typing import Any

import msgspec

from esper.leyline.rows import Row


def change(row: Row, **columns: Any) -> None:
    """Set columns of an immutable telemetry row in place."""
    for name, value in columns.items():
        msgspec.structs.force_setattr(row, name, value)
