"""Journal of a training's unfinished iteration, which readers use if the training is killed.

The rows of an iteration are written to their final file when the iteration is complete, ordered by
environment regardless of the number of processes. Until the iteration is complete, every process appends its
rows after each epoch to a journal file for the environments that train together. A journal that cannot be
written raises no error: its rows are still written when the iteration is complete, and ``RunWriter`` reports
a failure of that write.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from esper.files.append import open_to_append, write_all
from esper.files.row_files import TELEMETRY, unfinished_path
from esper.leyline import TABLES, TABLES_OF_DETAIL, Detail, Row
from esper.nissa.encoding import RowEncoder


class IterationJournal:
    """Journal files that one process writes: per iteration, one for all environments that train together."""

    def __init__(
        self, directory: Path, detail: Detail, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._telemetry = directory / TELEMETRY
        self._encoders = {TABLES[table]: RowEncoder(table) for table in TABLES_OF_DETAIL[detail]}
        self.began = 0.0
        """Clock value at the start of the run, which is the same in all processes."""
        self._clock = clock
        self._path: Path | None = None
        self._file: int | None = None

    def take(self, iteration: int, env: int, rows: Sequence[Row]) -> None:
        """Append the rows of one epoch of the environments that train together to their journal file.

        Args:
            iteration: Number of the iteration.
            env: First of the environments; its number is part of the journal file's name.
            rows: Telemetry rows of the epoch.
        """
        t = self._clock() - self.began
        written = [row for row in rows if type(row) in self._encoders]
        lines = bytearray().join(self._encoders[type(row)].line(row, t) for row in written)
        path = unfinished_path(self._telemetry, iteration) / f"env-{env:04d}.jsonl"
        try:
            if path != self._path:
                self.close()
                self._path = path
                self._file = open_to_append(path)
            if self._file is not None:
                write_all(self._file, lines)
        except OSError:
            with suppress(OSError):  # On a full disk, network file systems raise a second error on close.
                self.close()

    def close(self) -> None:
        """Close the journal file; may be called twice."""
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)
