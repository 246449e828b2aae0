"""One table within a run: rows become JSON lines in memory, then bytes of the part that is open."""

from __future__ import annotations

import os
from pathlib import Path

from esper.leyline.events import Row
from esper.leyline.run_files import PartSize, part_files, part_path
from esper.nissa.encoding import RowEncoder


class TablePart:
    """The buffer of one table and its open part; the file comes into being with the first row."""

    def __init__(self, telemetry: Path, table: str) -> None:
        self.folder = telemetry / table
        self.number = 0
        self._encoder = RowEncoder(table)
        self._buffer = bytearray()
        self._file: int | None = None
        self._bytes = 0
        """Of the open part, on disk."""
        self._last_t = 0.0

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
        self._buffer += self._encoder.line(row)
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
