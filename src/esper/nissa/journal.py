"""The rows of a training's iteration while it is lived: what a killed process leaves of it.

The tables take an iteration when it is complete, one environment after the other, however many processes
lived it. Until then every process appends its rows to journals, one file per shard of environments,
after each epoch. A journal that cannot be written is given up without a word: the rows still come into
the tables, and if those cannot be written, their writer says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from esper.leyline.columns import TABLE_OF
from esper.leyline.events import TABLES, TABLES_OF_DETAIL, Detail, Row
from esper.leyline.run_files import (
    JOURNALS,
    TELEMETRY,
    WRITTEN_FILE,
    PartSize,
    Written,
    journal_files,
    journal_path,
)
from esper.nissa.encoding import RowEncoder


class IterationJournal:
    """One process's own; the shards that it episodes come one after the other."""

    def __init__(
        self,
        directory: Path,
        detail: Detail,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._telemetry = directory / TELEMETRY
        self._encoders = {table: RowEncoder(table) for table in TABLES if table in TABLES_OF_DETAIL[detail]}
        self._began = 0.0
        self._clock = clock
        self._path: Path | None = None
        self._file: int | None = None

    def begin(self, began: float) -> None:
        """``began`` is the moment of the clock from which all processes of the run count its time."""
        self._began = began

    def take(self, number: int, env: int, rows: Sequence[Row]) -> None:
        """Hand the rows of an epoch of a shard, named by its first environment, to the operating system."""
        now = round(self._clock() - self._began, 6)
        lines = bytearray()
        for row in rows:
            row.t = now
            table = TABLE_OF[type(row)]
            if table in self._encoders:
                lines += f"{table}\t".encode() + self._encoders[table].line(row)
        path = journal_path(self._telemetry, number, env)
        try:
            if path != self._path:
                self._open(path)
            if self._file is not None:
                _write_all(self._file, lines)
        except OSError:
            with suppress(OSError):  # network file systems report a full disk once more
                self.close()

    def _open(self, path: Path) -> None:
        self.close()
        self._path = path
        path.parent.mkdir(exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def close(self) -> None:
        """Let go of the file; closing twice does nothing."""
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)


def begin_adding(telemetry: Path, number: int, sizes: Mapping[str, PartSize]) -> None:
    """Say that an iteration is being added to the tables behind ``sizes``: until it is, its journals count."""
    _say(telemetry, Written(number, dict(sizes)))


def end_adding(telemetry: Path, number: int) -> None:
    """Say that the tables hold the iteration, and remove its journals."""
    _say(telemetry, Written(number, None))
    discard_journals(telemetry, number)


def discard_journals(telemetry: Path, number: int) -> None:
    """Remove the journals of one iteration."""
    with suppress(OSError):
        for of_iteration, path in journal_files(telemetry):
            if of_iteration == number:
                path.unlink()


def forget_journals(telemetry: Path) -> None:
    """Remove every journal; raises ``OSError`` when that fails."""
    for _, path in journal_files(telemetry):
        path.unlink()


def forget_written(telemetry: Path) -> None:
    """Remove what says how far the tables are, and the folder; raises ``OSError`` when the first fails."""
    folder = telemetry / JOURNALS
    for path in (folder / WRITTEN_FILE, _partial(folder)):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # it may never have been there, or hold files of others
        folder.rmdir()


def tidy_journals(telemetry: Path) -> None:
    """Leave nothing behind where the tables hold every iteration."""
    with suppress(OSError):
        if not journal_files(telemetry):
            forget_written(telemetry)


def _say(telemetry: Path, written: Written) -> None:
    folder = telemetry / JOURNALS
    folder.mkdir(exist_ok=True)
    partial = _partial(folder)
    with partial.open("wb") as file:
        file.write(msgspec.json.encode(written))
        file.flush()
        os.fsync(file.fileno())  # or a power cut may leave it empty, and a run that cannot be read or resumed
    os.replace(partial, folder / WRITTEN_FILE)


def _partial(folder: Path) -> Path:
    """Within the folder of the journals: readers keep what they know of a run while its own is unchanged."""
    return folder / f"{WRITTEN_FILE}.partial"


def _write_all(file: int, content: bytearray) -> None:
    while content:
        del content[: os.write(file, content)]
