"""One row as a JSON line that names its table and the time, refused if it cannot be told truthfully.

A number that is not finite is refused, because JSON could only show it as null and null means
unknown. That is checked for every row, so it has to be cheap: no Python code per column.
"""

import math
from collections.abc import Iterator
from numbers import Real
from operator import attrgetter
from typing import Any, Final

import msgspec

from esper.leyline.columns import COLUMNS
from esper.leyline.errors import EsperError
from esper.leyline.rows import Row


class RowError(EsperError):
    """A row that cannot be written truthfully: a mistake of whoever produced it."""


def _plain_scalar(value: Any) -> Any:
    """Write a number that came out of an array like one of Python's own."""
    if not hasattr(value, "item") or getattr(value, "ndim", None) != 0:
        raise TypeError(f"{type(value).__name__} is not a plain value")
    plain = value.item()
    if isinstance(plain, float) and not math.isfinite(plain):
        raise ValueError(f"{plain} is not finite")
    return plain


_ENCODER: Final = msgspec.json.Encoder(enc_hook=_plain_scalar)


class RowEncoder:
    """The lines of one table."""

    def __init__(self, table: str) -> None:
        self._table = table
        self._begin = f'{{"table":"{table}","t":'.encode()
        # Every table has `t`; it is named once more since a getter of a single name gives no tuple.
        self._floats = attrgetter("t", *(column.name for column in COLUMNS[table] if column.is_float))
        self._nested = tuple(column.name for column in COLUMNS[table] if column.nests_floats)

    def line(self, row: Row, t: float) -> bytes:
        """The row as it is at ``t`` seconds of the run, with its newline; raises ``RowError``."""
        try:
            self._check_finite(row)
            encoded = _ENCODER.encode(row)
            # Its first column is the time, which is not known before it is written.
            return b"%b%.6f%b\n" % (self._begin, t, encoded[encoded.index(b",") :])
        except (TypeError, ValueError) as error:
            raise RowError(f"a row of table '{self._table}' cannot be written: {error}") from error

    def _check_finite(self, row: Row) -> None:
        # None and 0.0 drop out of the filter; NaN and the infinities do not.
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
            " a number must be finite, and None is what says unknown"
        )


def _all_finite(value: Any) -> bool:
    """Whether all numbers of a list or a map are finite; quick where it holds nothing else."""
    inner = value.values() if isinstance(value, dict) else value
    if inner is None:
        return True
    try:
        return all(map(math.isfinite, filter(None, inner)))
    except TypeError:  # texts, or lists and maps within
        return all(map(math.isfinite, _numbers_within(value)))


def _numbers_within(value: object) -> Iterator[float]:
    """Every number of a value, however deep in lists and maps."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers_within(inner)
    elif isinstance(value, Real):  # numpy's numbers too, which are not all floats
        yield float(value)
