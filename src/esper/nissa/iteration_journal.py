"""The rows of a training's iteration in progress: what readers find of it if the training is killed.

The rows of an iteration are written when it is complete, one environment after the other, however many
processes took part. Until then every process appends its rows to files, one per shard of environments,
after each epoch. A file that cannot be written is given up without a word: the rows are still written with
their iteration, and if that cannot be written, ``RunWriter`` says so.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from esper.leyline.columns import TABLE_OF
from esper.leyline.events import TABLES_OF_DETAIL, Detail, Row
from esper.leyline.run_files import TELEMETRY, unfinished_path
from esper.nissa.encoding import RowEncoder


class IterationJournal:
    """The files of one process, which works on one shard after the other."""

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
        """``began`` is the moment of the clock from which all processes of the run count its time."""
        self._began = began

    def take(self, iteration: int, env: int, rows: Sequence[Row]) -> None:
        """Hand the rows of an epoch of a shard, named by its first environment, to the operating system."""
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
            with suppress(OSError):  # network file systems report a full disk once more
                self.close()

    def close(self) -> None:
        """Let go of the file; closing twice does nothing."""
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)


def open_to_append(path: Path) -> int:
    """The descriptor of a file, made with its folder if need be; raises ``OSError``."""
    path.parent.mkdir(exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


def write_all(file: int, content: bytearray) -> None:
    """Hand all bytes to the operating system; ``content`` keeps those that were not. Raises ``OSError``."""
    while content:
        del content[: os.write(file, content)]
