"""Writes a run's rows to its directory: the end of a step's line, on the trainer's own thread.

A row is encoded at once and reaches the operating system at ``flush``, which the runner calls
after each epoch: a killed process loses the epoch in progress and leaves at most one torn last
line per table. No queue and no thread, so no row is dropped while the disk works; when it does
not, telemetry ends with one warning and training goes on.

A part that is full is closed and becomes Parquet. Rows of a resumable run may be cut back to its last
checkpoint, so its parts close when a checkpoint is taken and are converted when it is stored.
"""

from __future__ import annotations

import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from esper.leyline.columns import TABLE_OF
from esper.leyline.errors import RunDirectoryError
from esper.leyline.events import TABLES, TABLES_OF_DETAIL, AlertRow, Detail, ResourceRow, Row
from esper.leyline.run_files import TELEMETRY, PartSize
from esper.nissa.compaction import CompactionError, Compactor
from esper.nissa.encoding import RowError
from esper.nissa.journal import (
    begin_adding,
    discard_journals,
    end_adding,
    forget_journals,
    forget_written,
    tidy_journals,
)
from esper.nissa.lock import WriterLock
from esper.nissa.part import TablePart

RESOURCE_SECONDS: Final = 10.0
"""Least time between two resource rows."""
PART_BYTES: Final = 4_000_000
"""A part with more is full."""


class RunWriter:
    """The sink that keeps a run: parts of JSON lines per table, and Parquet of those that were full."""

    def __init__(
        self,
        directory: Path,
        warn: Callable[[str], None] | None = None,
        *,
        resumable: bool = False,
        resume_from: Mapping[str, PartSize] | None = None,
        detail: Detail = "full",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Claim ``directory``, made if need be; ``warn`` is told once if writing fails later.

        Parts of a ``resumable`` run close at its checkpoints only. With ``resume_from``, what an earlier
        writer's ``checkpoint`` gave, its files are continued from there and what came later is cut off.
        """
        self.directory = directory
        self.detail: Detail = detail
        """Rows of tables that are not part of this level are dropped; it may change at any time."""
        self.on_resources: Callable[[ResourceRow], None] = lambda row: None
        """Told of every resource row, the only rows that nobody else has seen."""
        self.failed = False
        telemetry = directory / TELEMETRY
        if resume_from is None:
            _claim(directory)
        self._lock = WriterLock(telemetry)
        self._parts = {table: TablePart(telemetry, table) for table in TABLES}
        if resume_from is not None:
            self._cut(resume_from)
        self._compactor = Compactor()
        self._resumable = resumable or resume_from is not None
        self._compaction_failed = False
        self._warn = warn or _warn_on_stderr
        self._open = True
        self._rows = 0
        self._busy_seconds = 0.0
        self._resource_due = RESOURCE_SECONDS
        self._clock = clock
        # A resumed run goes on in its own time, or its rows would lie before those that are there.
        self.began = clock() - max(part.size.t for part in self._parts.values())
        """The moment of the clock from which the run counts its time."""

    def _cut(self, sizes: Mapping[str, PartSize]) -> None:
        try:
            forget_journals(self.directory / TELEMETRY)
            for table, part in self._parts.items():
                part.cut(sizes.get(table, PartSize(0, 0)))
            # Not before: until they are cut, it keeps readers from half an iteration in the tables.
            forget_written(self.directory / TELEMETRY)
        except OSError as error:
            self._lock.release()
            raise RunDirectoryError(
                f"run directory '{self.directory}' cannot be written: {error.strerror}"
            ) from error

    def emit(self, row: Row) -> None:
        """Stamp the row's time and take it; it reaches the disk at the next ``flush``."""
        if not self._accepts():
            return
        now = self._clock()
        row.t = round(now - self.began, 6)
        table = TABLE_OF.get(type(row))
        if table is None:
            raise RowError(f"{type(row).__name__} belongs to no table of leyline.events.TABLES")
        if table not in TABLES_OF_DETAIL[self.detail]:
            return
        self._parts[table].append(row)
        self._rows += 1
        self._busy_seconds += self._clock() - now

    def keep(self, name: str, content: bytes) -> None:
        """Write a whole file beside the tables, under the run's directory."""
        if not self._accepts():
            return
        path = self.directory / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError as error:
            self._fail(path, error)

    def flush(self) -> None:
        """Hand everything taken so far to the operating system."""
        if not self._accepts():
            return
        now = self._clock()
        if now - self.began >= self._resource_due:
            self._emit_resource()
        self._write_out()
        if not self._resumable:
            self._compact(self._rotate())
        self._busy_seconds += self._clock() - now

    @contextmanager
    def adding_iteration(self, number: int) -> Iterator[None]:
        """``flush`` after the rows of an iteration that journals hold, which are emitted within the context.

        A process that ends at any moment, on its own or not, leaves each row once.
        """
        telemetry = self.directory / TELEMETRY
        if not self._accepts():
            yield
            discard_journals(telemetry, number)
            return
        with self._failing_at(telemetry):
            begin_adding(telemetry, number, self._sizes())
        yield
        self.flush()
        if not self.failed:
            with self._failing_at(telemetry):
                end_adding(telemetry, number)

    @contextmanager
    def _failing_at(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._fail(path, error)

    def _sizes(self) -> dict[str, PartSize]:
        return {table: part.size for table, part in self._parts.items()}

    @contextmanager
    def checkpoint(self) -> Iterator[dict[str, PartSize]]:
        """How far each table is on disk, to be stored within the context: ``resume_from`` of a later writer.

        What was not flushed does not count. Full parts are closed before, and converted if all went well.
        Where writing has failed, rows end there, and a later writer goes on from there.
        """
        if not self.failed:
            self._rotate()
        yield self._sizes()
        if not self.failed:
            now = self._clock()
            self._compact(self._parts)
            self._busy_seconds += self._clock() - now

    def close(self) -> None:
        """Write what is left and a last resource row; closing twice does nothing."""
        if self._open:
            self._emit_resource()
            self._write_out()
            self._close_parts()
        if not self.failed:
            tidy_journals(self.directory / TELEMETRY)
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accepts(self) -> bool:
        if not self._open and not self.failed:
            raise RowError(f"the writer of run directory '{self.directory}' is closed")
        return self._open

    def _emit_resource(self) -> None:
        self._resource_due = self._clock() - self.began + RESOURCE_SECONDS
        try:
            free = shutil.disk_usage(self.directory).free
        except OSError as error:
            self._fail(self.directory, error)
            return
        row = ResourceRow(
            rss_mb=_peak_mb(),
            rows_written=self._rows + 1,  # with this one
            writer_ms=self._busy_seconds * 1e3,
            disk_free_mb=free / 1e6,
        )
        self.emit(row)
        self.on_resources(row)

    def _write_out(self) -> None:
        for part in self._parts.values():
            try:
                part.write_out()
            except OSError as error:
                self._fail(part.path, error)
                return

    def _rotate(self) -> list[str]:
        """Close the parts that are full; which they were."""
        full = [table for table, part in self._parts.items() if part.size.bytes > PART_BYTES]
        for table in full:
            try:
                self._parts[table].rotate()
            except OSError as error:  # network file systems report a full disk here
                self._fail(self._parts[table].path, error)
                return []
        return full

    def _compact(self, tables: Iterable[str]) -> None:
        """Lines that cannot be converted are no loss; the first time is worth a row."""
        for table in tables:
            part = self._parts[table]
            try:
                self._compactor.compact(part.folder, table, part.number)
            except CompactionError as error:
                if not self._compaction_failed:
                    self._compaction_failed = True
                    self.emit(_alert_of(error))

    def _close_parts(self) -> None:
        self._open = False
        for part in self._parts.values():
            try:
                part.close()
            except OSError as error:
                self._fail(part.path, error)

    def _fail(self, path: Path, error: OSError) -> None:
        """End telemetry, with one sentence however many files are affected."""
        if self.failed:
            return
        self.failed = True
        self._close_parts()
        self._warn(
            f"telemetry stopped: cannot write {path} ({error.strerror});"
            " the run goes on, its further rows are lost"
        )


def _claim(directory: Path) -> None:
    """Make the run's directory and the one for telemetry in it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        held = sorted(entry.name for entry in directory.iterdir())
        if held:
            listed = ", ".join(held[:3]) + (" and more" if len(held) > 3 else "")
            raise RunDirectoryError(
                f"run directory '{directory}' already holds {listed}; choose another one, or move it away"
            )
        (directory / TELEMETRY).mkdir()  # of two runs that start at once, the second fails here
    except OSError as error:
        raise RunDirectoryError(
            f"run directory '{directory}' cannot be written: {error.strerror}; choose another one"
        ) from error


def _alert_of(error: CompactionError) -> AlertRow:
    return AlertRow(
        rule="compaction",
        event="raised",
        severity="warning",
        scope="telemetry",
        value=None,
        limit=None,
        hint=f"a part stays JSON lines, which readers take as well: {error}",
    )


def _peak_mb() -> float:
    """Largest resident memory so far; Linux counts it in KiB, macOS in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def _warn_on_stderr(message: str) -> None:
    sys.stderr.write(f"esper: {message}\n")
