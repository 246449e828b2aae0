"""Journal of a training's unfinished iteration, which readers use if the training is killed.

The rows of an iteration are written when it is complete, ordered by environment regardless of the number of
processes. Until the iteration is complete, every process appends its rows after each epoch to one file per
shard of environments. A journal that cannot be written is dropped silently: its rows are still written with
the iteration, and ``RunWriter`` reports a failure of that write.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from esper.files.row_files import TELEMETRY, unfinished_path
from esper.leyline.columns import TABLE_OF
from esper.leyline.rows import TABLES_OF_DETAIL, Detail, Row
from esper.nissa.encoding import RowEncoder


class IterationJournal:
    """Journal files of one process, which handles one shard of environments after another."""

    def __init__(
        self, directory: Path, detail: Detail, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._telemetry = directory / TELEMETRY
        self._encoders = {table: RowEncoder(table) for table in TABLES_OF_DETAIL[detail]}
        self._began = 0.0
        self._clock = clock
        self._path: Path | None = None
        self._file: int | None = None

    def begin(self, began: float) -> None:
        """Set the clock value at which the run started, which is common to all processes."""
        self._began = began

    def take(self, iteration: int, env: int, rows: Sequence[Row]) -> None:
        """Append the rows of an epoch of a shard.

        Args:
            iteration: Number of the iteration.
            env: First environment of the shard, which names the file.
            rows: Rows of the epoch.
        """
        t = self._clock() - self._began
        lines = bytearray()
        for row in rows:
            encoder = self._encoders.get(TABLE_OF[type(row)])
            if encoder is not None:
                lines += encoder.line(row, t)
        path = unfinished_path(self._telemetry, iteration) / f"env-{env:04d}.jsonl"
        try:
            if path != self._path:
                self.close()
                self._path = path
                self._file = open_to_append(path)
            if self._file is not None:
                write_all(self._file, lines)
        except OSError:
            with suppress(OSError):  # Network file systems report a full disk again on close.
                self.close()

    def close(self) -> None:
        """Close the journal file; may be called twice."""
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)


def open_to_append(path: Path) -> int:
    """Open a file for appending and create its folder; raises ``OSError``."""
    path.parent.mkdir(exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


def write_all(file: int, content: bytearray) -> None:
    """Write all bytes; after an ``OSError``, ``content`` holds the bytes that were not written."""
    while content:
        del content[: os.write(file, content)]
