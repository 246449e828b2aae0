"""Writer of a run's rows, on the trainer's thread.

A row is encoded at once and handed to the operating system by ``flush``, which the runner calls after each
epoch: a killed process loses at most the current epoch and leaves at most one partial last line. The rows of
a training's iteration are written together when it is complete (``iteration``). There is no queue and no
thread, so no row is dropped while the disk works; if writing fails, telemetry ends with one warning and the
run continues.

JSON lines are converted to Parquet above a size limit. A training may return to its last checkpoint, so its
JSON lines are converted when a checkpoint is stored.
"""

import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

from esper.files.atomic_write import SaveError, write_durably
from esper.files.row_files import TELEMETRY, RowMark, lines_path, parquet_path, row_files, unfinished_path
from esper.files.writer_lock import WriterLock
from esper.leyline.columns import TABLE_OF
from esper.leyline.errors import EsperError, RunDirectoryError
from esper.leyline.rows import TABLES, TABLES_OF_DETAIL, AlertRow, Detail, ResourceRow, Row
from esper.nissa.compaction import CompactionError, compact, remove
from esper.nissa.encoding import RowEncoder, RowError
from esper.nissa.iteration_journal import open_to_append, write_all

RESOURCE_SECONDS: Final = 10.0
"""Minimum time between two resource rows."""
LINES_BYTES: Final = 8_000_000
"""Size of the JSON lines above which they are converted to Parquet."""


class RunWriter(AbstractContextManager["RunWriter"]):
    """Event sink that writes a run to its directory."""

    def __init__(
        self,
        directory: Path,
        *,
        resume_from: RowMark | None = None,
        detail: Detail = "full",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create ``directory`` and lock it.

        Args:
            directory: Run directory; it must be empty unless the run is resumed.
            resume_from: Mark from ``checkpoint`` of an earlier writer; later rows are removed.
            detail: Level of detail; rows of tables outside this level are dropped.
            clock: Clock of the run, in seconds.

        Raises:
            RunDirectoryError: The directory is not empty or cannot be written.
        """
        self.directory = directory
        self.detail: Detail = detail
        """Level of detail, which may change at any time; rows of tables outside this level are dropped."""
        self.on_resources: Callable[[ResourceRow], None] = lambda row: None
        """Callback for every resource row, since the writer creates these rows itself."""
        self.failed = False
        if resume_from is None:
            _claim(directory)
        self._telemetry = directory / TELEMETRY
        self._lock = WriterLock(self._telemetry)
        self._mark = resume_from or RowMark(0, 0.0)
        self._last = -1
        """Highest number of an existing telemetry file."""
        self._trains = resume_from is not None
        """Whether rows are written together at the end of each iteration."""
        self._ended = False
        """Whether the last resource row was emitted."""
        if resume_from is not None:
            self._go_back(resume_from.iteration)
        self._encoders = {table: RowEncoder(table) for table in TABLES}
        self._buffer = bytearray()
        self._file: int | None = None
        self._line_bytes = 0
        """Bytes of JSON lines on disk since the last conversion."""
        self._compaction_failed = False
        self._open = True
        self._rows = 0
        self._busy_seconds = 0.0
        self._resource_due = RESOURCE_SECONDS
        self._clock = clock
        # A resumed run continues its clock, so that new rows are later than existing ones.
        self.began = clock() - self._mark.seconds
        """Clock value at the start of the run."""

    def _go_back(self, iteration: int) -> None:
        """Remove the rows after an iteration, the last iteration first, so that no gap exists at any time."""
        try:
            found = row_files(self._telemetry)
            later = [span for span in found.spans if span.last > iteration]
            for span in (*found.superseded, *found.unfinished, *reversed(later)):
                remove(span.path)
            for partial in self._telemetry.glob("*.partial"):
                remove(partial)
            self._last = row_files(self._telemetry).last
        except (EsperError, OSError) as error:
            self._lock.release()
            if isinstance(error, EsperError):
                raise
            raise RunDirectoryError(f"'{self.directory}' cannot be written: {error.strerror}") from error

    # --- rows ---------------------------------------------------------------------------------------

    def emit(self, row: Row) -> None:
        """Encode a row with the current time; ``flush`` or the end of the iteration writes it."""
        if not self._accepts():
            return
        now = self._clock()
        table = TABLE_OF.get(type(row))
        if table is None:
            raise RowError(f"{type(row).__name__} belongs to no table of leyline.rows.TABLES")
        if table not in TABLES_OF_DETAIL[self.detail]:
            return
        self._buffer += self._encoders[table].line(row, now - self.began)
        self._rows += 1
        self._busy_seconds += self._clock() - now

    def keep(self, name: str, content: bytes) -> None:
        """Write a complete file to the run's directory."""
        if not self._accepts():
            return
        try:
            write_durably(self.directory / name, content)
        except SaveError as error:
            self._fail(self.directory / name, error.reason)

    def flush(self) -> None:
        """Write all buffered rows; does nothing in a training, where ``iteration`` writes them."""
        if not self._accepts() or self._trains:
            return
        now = self._clock()
        self._emit_resource(if_due=True)
        self._write_out(lines_path(self._telemetry, max(self._last, 0)))
        if self._line_bytes > LINES_BYTES:
            self._close_file()
            self._compact(self._last)
            self._last += 1
        self._busy_seconds += self._clock() - now

    @contextmanager
    def iteration(self, number: int, *, is_last: bool = False) -> Iterator[None]:
        """Write the rows emitted within the context as one iteration, completely or not at all.

        If writing fails, the journal of the iteration is kept, and rows of later iterations are not written.

        Args:
            number: Number of the iteration; 0 for the rows before the first iteration.
            is_last: Add the final resource row.
        """
        begin = len(self._buffer)
        self._trains = True
        try:
            yield
            if self._accepts():
                now = self._clock()
                self._emit_resource(if_due=not is_last)
                self._ended = is_last
                self._commit(number)
                self._busy_seconds += self._clock() - now
            else:
                shutil.rmtree(unfinished_path(self._telemetry, number), ignore_errors=True)
        except BaseException:
            del self._buffer[begin:]
            raise

    def _commit(self, number: int) -> None:
        path = lines_path(self._telemetry, number)
        try:
            self._close_file()
            if number > self._last + 1:  # Iterations lost to a full disk are marked by an empty range.
                parquet_path(self._telemetry, self._last + 1, number - 1).mkdir()
            write_durably(path, self._buffer)
        except SaveError as error:
            self._fail(path, error.reason)
        except OSError as error:
            self._fail(path, error.strerror)
        else:
            self._last = number
            self._mark = RowMark(number, self._clock() - self.began)
            self._line_bytes += len(self._buffer)
            self._buffer.clear()
            shutil.rmtree(unfinished_path(self._telemetry, number), ignore_errors=True)

    @contextmanager
    def checkpoint(self) -> Iterator[RowMark]:
        """Yield the mark of the last written row; the caller stores the mark inside the context, for
        ``resume_from``.

        If storing succeeds, JSON lines may be converted, because no run returns to a point before this
        checkpoint.
        """
        yield self._mark
        if not self.failed and self._line_bytes > LINES_BYTES:
            now = self._clock()
            self._compact(self._mark.iteration)
            self._busy_seconds += self._clock() - now

    # --- close and failure --------------------------------------------------------------------------

    def close(self) -> None:
        """Write the remaining rows and a last resource row; may be called twice."""
        if self._open:
            if not self._ended:
                self._emit_resource()
            unfinished = unfinished_path(self._telemetry, self._last + 1) / "run.jsonl"
            if self._trains:
                self._close_file()
            self._write_out(unfinished if self._trains else lines_path(self._telemetry, max(self._last, 0)))
            self._end()
        self._lock.release()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _accepts(self) -> bool:
        if not self._open and not self.failed:
            raise RowError(f"the writer of run directory '{self.directory}' is closed")
        return self._open

    def _end(self) -> None:
        self._open = False
        self._buffer.clear()
        self._close_file()

    def _fail(self, path: Path, reason: str | None) -> None:
        """End telemetry with one message, regardless of the number of files affected."""
        if self.failed:
            return
        self.failed = True
        self._end()
        ending = "the run goes on, its further rows are lost"
        sys.stderr.write(f"esper: telemetry stopped: cannot write {path} ({reason}); {ending}\n")

    # --- files --------------------------------------------------------------------------------------

    def _write_out(self, path: Path) -> None:
        """Append the buffered rows to the file ``path``, which is opened if necessary."""
        if not self._buffer:
            return
        size = len(self._buffer)
        try:
            if self._file is None:
                self._file = open_to_append(path)
                self._last = max(self._last, 0)
            write_all(self._file, self._buffer)
            self._line_bytes += size
        except OSError as error:
            self._fail(path, error.strerror)

    def _close_file(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            try:
                os.close(file)
            except OSError as error:  # Network file systems report a full disk on close.
                self._fail(self._telemetry, error.strerror)

    def _compact(self, last: int) -> None:
        """Convert JSON lines to Parquet; a failure loses no row and is reported once by an alert row."""
        self._line_bytes = 0
        try:
            compact(self._telemetry, last)
        except CompactionError as error:
            if not self._compaction_failed:
                self._compaction_failed = True
                self.emit(
                    AlertRow(
                        rule="compaction",
                        event="raised",
                        severity="warning",
                        scope="telemetry",
                        value=None,
                        limit=None,
                        hint=f"rows stay JSON lines, which readers take as well: {error}",
                    )
                )

    def _emit_resource(self, *, if_due: bool = False) -> None:
        seconds = self._clock() - self.began
        if if_due and seconds < self._resource_due:
            return
        self._resource_due = seconds + RESOURCE_SECONDS
        try:
            free = shutil.disk_usage(self.directory).free
        except OSError as error:
            self._fail(self.directory, error.strerror)
            return
        row = ResourceRow(
            rss_mb=_peak_mb(),
            rows_written=self._rows + 1,  # The count includes this row.
            writer_ms=self._busy_seconds * 1e3,
            disk_free_mb=free / 1e6,
        )
        self.emit(row)
        self.on_resources(row)


def _claim(directory: Path) -> None:
    """Create the run's directory and its telemetry folder."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        held = sorted(entry.name for entry in directory.iterdir())
        if held:
            listed = ", ".join(held[:3]) + (" and more" if len(held) > 3 else "")
            raise RunDirectoryError(
                f"run directory '{directory}' already holds {listed}; choose another one, or move it away"
            )
        # The lock fails for the second of two runs that start at the same time.
        (directory / TELEMETRY).mkdir()
    except OSError as error:
        raise RunDirectoryError(
            f"run directory '{directory}' cannot be written: {error.strerror}; choose another one"
        ) from error


def _peak_mb() -> float:
    """Return the peak resident memory in MB; Linux reports KiB, macOS bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
