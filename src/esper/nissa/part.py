"""One table within a run: rows become JSON lines in memory, then bytes of the part that is open.

A number that is not finite is refused, because JSON could only show it as null and null means
unknown. That is checked for every row, so it has to be cheap: no Python code per column.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from numbers import Real
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from esper.leyline.columns import COLUMNS
from esper.leyline.errors import EsperError
from esper.leyline.events import Row
from esper.leyline.run_files import PartSize, part_files, part_path


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


class TablePart:
    """The buffer of one table and its open part; the file comes into being with the first row."""

    def __init__(self, telemetry: Path, table: str) -> None:
        self.folder = telemetry / table
        self.number = 0
        self._table = table
        self._buffer = bytearray()
        self._file: int | None = None
        self._bytes = 0
        """Of the open part, on disk."""
        self._last_t = 0.0
        # Every table has `t`; it is named once more since a getter of a single name gives no tuple.
        self._floats = attrgetter("t", *(column.name for column in COLUMNS[table] if column.is_float))
        self._nested = tuple(column.name for column in COLUMNS[table] if column.nests_floats)

    @property
    def path(self) -> Path:
        """The file of the open part."""
        return part_path(self.folder, self.number, "jsonl")

    @property
    def size(self) -> PartSize:
        """How far the table is on disk."""
        return PartSize(self.number, self._bytes, self._last_t)

    def append(self, row: Row) -> None:
        """Encode one row into memory, whole or not at all."""
        try:
            self._check_finite(row)
            line = _ENCODER.encode(row)
        except (TypeError, ValueError) as error:
            raise RowError(f"a row of table '{self._table}' cannot be written: {error}") from error
        # One operation, so that an interrupt cannot come between a row and its newline.
        self._buffer += line + b"\n"
        self._last_t = row.t

    def write_out(self) -> None:
        """Hand the buffer to the operating system; raises ``OSError`` when that fails."""
        if not self._buffer:
            return
        if self._file is None:
            self.folder.mkdir(exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        whole = len(self._buffer)
        while self._buffer:
            written = os.write(self._file, self._buffer)
            del self._buffer[:written]
        self._bytes += whole  # not before: a row that is torn on a full disk does not count

    def cut(self, size: PartSize) -> None:
        """Forget everything on disk beyond ``size`` and go on there; raises ``OSError`` when that fails."""
        for number, path in reversed(part_files(self.folder)):  # so that no gap is left at any moment
            if number > size.part:
                path.unlink()
        self.number, self._bytes, self._last_t = size
        if self.path.exists():
            os.truncate(self.path, size.bytes)

    def rotate(self) -> None:
        """Close the open part; the next row begins another one."""
        self._close_file()
        self.number += 1
        self._bytes = 0

    def close(self) -> None:
        """Close the file and forget what was not written out."""
        self._buffer.clear()
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def _check_finite(self, row: Row) -> None:
        # None and 0.0 drop out of the filter; NaN and the infinities do not.
        if not all(map(math.isfinite, filter(None, self._floats(row)))):
            self._refuse_non_finite(row)
        for name in self._nested:
            if not _all_finite(getattr(row, name)):
                self._refuse_non_finite(row)

    def _refuse_non_finite(self, row: Row) -> NoReturn:
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
