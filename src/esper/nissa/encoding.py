"""Encoding of a row as a JSON line with its table and time.

Non-finite numbers are refused, because JSON could only write null, which means unknown. The check for
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
    """Convert a scalar of an array library to a Python number."""
    if not hasattr(value, "item") or getattr(value, "ndim", None) != 0:
        raise TypeError(f"{type(value).__name__} is not a plain value")
    plain = value.item()
    if isinstance(plain, float) and not math.isfinite(plain):
        raise ValueError(f"{plain} is not finite")
    return plain


_ENCODER: Final = msgspec.json.Encoder(enc_hook=_plain_scalar)


class RowEncoder:
    """Encoder for the rows of one table."""

    def __init__(self, table: str) -> None:
        self._table = table
        self._begin = f'{{"table":"{table}","t":'.encode()
        # The column `t` is added because attrgetter of a single name returns no tuple.
        self._floats = attrgetter("t", *(column.name for column in COLUMNS[table] if column.is_float))
        self._nested = tuple(column.name for column in COLUMNS[table] if column.nests_floats)

    def line(self, row: Row, t: float) -> bytes:
        """Encode a row at ``t`` seconds of the run, with a newline; raises ``RowError``."""
        try:
            self._check_finite(row)
            encoded = _ENCODER.encode(row)
            # The first column is the time, which is known only when the row is written.
            return b"%b%.6f%b\n" % (self._begin, t, encoded[encoded.index(b",") :])
        except (TypeError, ValueError) as error:
            raise RowError(f"a row of table '{self._table}' cannot be written: {error}") from error

    def _check_finite(self, row: Row) -> None:
        # filter() drops None and 0.0, but not NaN or infinities.
        flat = all(map(math.isfinite, filter(None, self._floats(row))))
        if flat and all(_all_finite(getattr(row, name)) for name in self._nested):
            return
        name, number = next(
            (column.name, number)
            for column in COLUMNS[self._table]
            for number in _numbers_within(getattr(row, column.name))
            if not math.isfinite(number)
        )
        raise RowError(
            f"column '{name}' of table '{self._table}' is {number};"
            " a number must be finite; use None for an unknown value"
        )


def _all_finite(value: Any) -> bool:
    """Return whether all numbers of a list or map are finite; fast for flat values."""
    inner = value.values() if isinstance(value, dict) else value
    if inner is None:
        return True
    try:
        return all(map(math.isfinite, filter(None, inner)))
    except TypeError:  # The values are strings, nested lists or maps.
        return all(map(math.isfinite, _numbers_within(value)))


def _numbers_within(value: object) -> Iterator[float]:
    """Yield every number in nested lists and maps."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers_within(inner)
    elif isinstance(value, Real):  # Real includes numpy scalars, of which not all are floats.
        yield float(value)
