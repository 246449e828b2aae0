"""Encoding of a telemetry row as a JSON line that starts with the name of the table and the time.

Non-finite numbers in rows are refused, because JSON could only write null, which means unknown. The check for
non-finite numbers runs for every row and must be cheap, so it uses no Python code per column.
"""

import math
from collections.abc import Iterator
from numbers import Real
from operator import attrgetter
from typing import Any, Final

import msgspec

from esper.leyline import EsperError, Row
from esper.leyline.columns import COLUMNS


class RowError(EsperError):
    """Error: a row cannot be encoded, because the code that made the row is wrong."""


def _plain_scalar(value: Any) -> Any:
    """Convert a scalar of an array library, such as numpy, to a Python number."""
    if not hasattr(value, "item") or getattr(value, "ndim", None) != 0:
        raise TypeError(f"{type(value).__name__} is not a plain value")
    plain = value.item()
    if isinstance(plain, float) and not math.isfinite(plain):
        raise ValueError(f"{plain} is not finite")
    return plain


_ENCODER: Final = msgspec.json.Encoder(enc_hook=_plain_scalar)


class RowEncoder:
    """Encoder of the rows of one telemetry table as JSON lines."""

    def __init__(self, table: str) -> None:
        self._table = table
        self._begin = f'{{"table":"{table}","t":'.encode()
        # The column `t` (time) makes two or more names; for a single name attrgetter() would return no tuple.
        self._floats = attrgetter("t", *(column.name for column in COLUMNS[table] if column.is_float))
        self._nested = tuple(column.name for column in COLUMNS[table] if column.nests_floats)

    def line(self, row: Row, t: float) -> bytes:
        """Return a row as a JSON line with its newline; ``t`` is its time in seconds since the start of the
        run. Raises ``RowError`` if the row has a number that is not finite or a value that JSON cannot
        represent.
        """
        try:
            self._check_finite(row)
            encoded = _ENCODER.encode(row)
            # The row was encoded with an unset time, which is replaced here by the time of writing.
            return b"%b%.6f%b\n" % (self._begin, t, encoded[encoded.index(b",") :])
        except (TypeError, ValueError) as error:
            raise RowError(f"a row of table '{self._table}' cannot be written: {error}") from error

    def _check_finite(self, row: Row) -> None:
        # filter() drops None and 0.0, but keeps NaN and infinities.
        flat = all(map(math.isfinite, filter(None, self._floats(row))))
        if flat and all(_all_finite(getattr(row, name)) for name in self._nested):
            return
        for column in COLUMNS[self._table]:
            for number in _numbers_within(getattr(row, column.name)):
                if not math.isfinite(number):
                    raise RowError(
                        f"column '{column.name}' of table '{self._table}' is {number};"
                        " a number must be finite; use None for an unknown value"
                    )


def _all_finite(value: Any) -> bool:
    """Return whether all numbers of a list or map are finite; fast if the list or map is not nested."""
    inner = value.values() if isinstance(value, dict) else value
    if inner is None:
        return True
    try:
        return all(map(math.isfinite, filter(None, inner)))
    except TypeError:  # math.isfinite() raises TypeError for strings, nested lists and maps.
        return all(map(math.isfinite, _numbers_within(value)))


def _numbers_within(value: object) -> Iterator[float]:
    """Yield every number in nested lists and maps."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers_within(inner)
    # The class Real also includes numpy scalars that are not instances of float.
    elif isinstance(value, Real):
        yield float(value)
