"""Writer of the telemetry rows of a run, on the thread of the training.

A row is encoded at once and written to its file by ``flush``, which is called after each epoch: a killed
process loses at most the current epoch and leaves at most one partial last line. In a policy training, the
rows of an iteration are written together when the iteration is complete (method ``iteration``). The writer
has no queue and no thread, so no row is dropped as long as files can be written.

A run continues while its directory cannot be written (ADR 0044). Rows then wait in memory and are written
with the next rows. If rows are still unwritten at the end of the run, a ``SaveError`` is raised.

JSON lines of rows are converted to Parquet when they exceed a size limit. A policy training may be resumed
from its last checkpoint, so its JSON lines are converted only when a checkpoint is stored.
"""

import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Final

from esper.files.append import open_to_append, write_all
from esper.files.atomic_write import (
    SaveError,
    flush_to_disk,
    make_folder,
    remove,
    remove_partials,
    save_errors,
    write_durably,
)
from esper.files.row_files import (
    TELEMETRY,
    RowMark,
    check_outside_runs,
    lines_path,
    parquet_path,
    row_files,
    unfinished_path,
)
from esper.files.writer_lock import WriterLock
from esper.leyline import TABLES_OF_DETAIL, AlertRow, Detail, ResourceRow, Row, RunDirectoryError, notify
from esper.leyline.columns import TABLE_OF
from esper.nissa.compaction import CompactionError, compact
from esper.nissa.encoding import RowEncoder, RowError

RESOURCE_SECONDS: Final = 10.0
"""Minimum time between two resource rows (memory and disk space)."""
LINES_BYTES: Final = 8_000_000
"""Size of a run's JSON lines above which they are converted to Parquet."""
WAITING_BYTES: Final = 100_000_000
"""Size of the rows that wait in memory for a full disk above which they and all further rows are dropped."""


class RunWriter(AbstractContextManager["RunWriter"]):
    """Writer of the telemetry rows and other files of a run to its run directory."""

    def __init__(
        self,
        directory: Path,
        *,
        resume_from: RowMark | None = None,
        detail: Detail = "full",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create and lock the run directory; a resumed run locks its existing directory.

        Args:
            directory: Run directory; it must be empty unless the run is resumed.
            resume_from: Position that ``checkpoint`` of an earlier writer yielded; rows after this position
                are removed.
            detail: Level of detail; rows of tables outside this level are dropped.
            clock: Function that returns the current time in seconds.

        Raises:
            EsperError: The directory is not empty, cannot be written, or is inside the telemetry of a run.
        """
        self.directory = directory
        self.detail: Detail = detail
        """Level of detail; it may change at any time, and rows of tables outside it are dropped."""
        self.on_resources: Callable[[ResourceRow], None] = lambda row: None
        """Callback that receives every resource row, since the writer creates these rows itself."""
        self._unsaved: dict[str, str] = {}
        """Error message of everything that could not be written, by its name."""
        if resume_from is None:
            check_outside_runs(directory)
            _claim(directory)
        self._telemetry = directory / TELEMETRY
        self._lock = WriterLock(self._telemetry)
        self._mark = resume_from or RowMark(0, 0.0)
        self._last = -1
        """Highest number of an existing telemetry file; -1 if there is none."""
        self._trains = resume_from is not None
        """Whether the run is a policy training, whose rows are written once per iteration."""
        self._ended = False
        """Whether the final resource row of the run was emitted."""
        self._take_over(resume_from)
        self._encoders = {table: RowEncoder(table) for table in TABLE_OF.values()}
        self._buffer = bytearray()
        self._file: int | None = None
        self._line_bytes = 0
        """Bytes of JSON lines written since the last conversion to Parquet."""
        self._compaction_failed = False
        self._open = True
        self._due: int | None = None
        """Latest complete iteration if its rows wait in the buffer."""
        self._rows = 0
        self._busy_seconds = 0.0
        self._resource_due = RESOURCE_SECONDS
        self._clock = clock
        # A resumed run continues the clock of the earlier run, so new rows have later times than old rows.
        self.began = clock() - self._mark.seconds
        """Clock value at the start of the run."""

    def _take_over(self, resume_from: RowMark | None) -> None:
        """Remove the rows after ``resume_from`` and change the signature; release the lock after an error."""
        with ExitStack() as undo, save_errors(self.directory, RunDirectoryError):
            undo.callback(self._lock.release)
            if resume_from is not None:
                self._go_back(resume_from.iteration)
            # Readers that see another signature than before read all rows again.
            self._lock.sign()
            undo.pop_all()

    def _go_back(self, iteration: int) -> None:
        """Remove the rows of all iterations after ``iteration``, the latest first, so that the remaining rows
        never have a gap.
        """
        found = row_files(self._telemetry)
        later = [span for span in found.spans if span.last > iteration]
        for span in (*found.superseded, *found.unfinished, *reversed(later)):
            remove(span.path)
        remove_partials(self.directory, below=True)
        self._last = row_files(self._telemetry).last

    # --- rows ---------------------------------------------------------------------------------------

    def emit(self, row: Row) -> None:
        """Encode a row with the current time and buffer it; ``flush`` or the end of the iteration writes the
        buffer to disk.
        """
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
        """Write ``content`` as the file ``name`` of the run directory."""
        if self._accepts():
            with self.attempt(name):
                write_durably(self.directory / name, content)

    def flush(self) -> None:
        """Write all buffered rows to disk; does nothing in a policy training, where ``iteration`` writes the
        rows.
        """
        if not self._accepts() or self._trains:
            return
        now = self._clock()
        self._emit_resource(if_due=True)
        self._write_out()
        if self._line_bytes > LINES_BYTES and not self._buffer:
            self._close_file()
            self._compact(self._last)
            self._last += 1
        self._busy_seconds += self._clock() - now

    @contextmanager
    def iteration(self, number: int, *, is_last: bool = False) -> Iterator[None]:
        """Write the rows emitted within the ``with`` block as one iteration, completely or not at all.

        If writing fails, the journal of the iteration is kept, and its rows are written with those of the
        next iteration.

        Args:
            number: Number of the iteration; 0 for the rows before the first iteration.
            is_last: Whether the iteration is the last of the training; it then ends with a resource row.
        """
        begin = len(self._buffer)
        self._trains = True
        try:
            yield
            self._due = number
        except BaseException:
            if self._due != number:
                del self._buffer[begin:]
            raise
        if self._accepts():
            now = self._clock()
            self._emit_resource(if_due=not is_last)
            self._ended = is_last
            self._commit()
            self._busy_seconds += self._clock() - now

    def _commit(self) -> None:
        """Write the rows of all complete iterations that are not on disk yet."""
        if self._due is None:
            return
        number, path = self._due, lines_path(self._telemetry, self._due)
        with self._attempt_rows(path):
            self._lock.check()
            self._close_file()
            # An iteration whose rows are in the file of a later one has an empty Parquet folder.
            if number > self._last + 1:
                parquet_path(self._telemetry, self._last + 1, number - 1).mkdir(exist_ok=True)
            write_durably(path, self._buffer)
            self._due = None
            self._line_bytes += len(self._buffer)
            self._buffer.clear()
            self._mark = RowMark(number, self._clock() - self.began)
            while self._last < number:
                self._last += 1
                shutil.rmtree(unfinished_path(self._telemetry, self._last), ignore_errors=True)

    @contextmanager
    def checkpoint(self) -> Iterator[RowMark]:
        """Yield the position of the last written row, which the caller stores in a checkpoint within the
        ``with`` block.

        After a checkpoint was stored, JSON lines of rows may be converted to Parquet, because no run resumes
        from an earlier checkpoint.
        """
        self._commit()
        yield self._mark
        if self._line_bytes > LINES_BYTES:
            now = self._clock()
            self._compact(self._mark.iteration)
            self._busy_seconds += self._clock() - now

    # --- close and failure --------------------------------------------------------------------------

    @contextmanager
    def attempt(self, name: str, remedy: str = "") -> Iterator[None]:
        """Let the run continue if a file cannot be written in the ``with`` block.

        Of several failures of the same name in a row, the first is printed. Unless a later attempt succeeds,
        the end of the run raises the error.

        Args:
            name: Name of what is written, such as "checkpoint".
            remedy: End of the error message, such as the command that resumes the run.
        """
        try:
            yield
        except (OSError, SaveError) as error:
            if name not in self._unsaved:
                notify(f"{error}; what was saved before is intact, and the run continues")
            self._unsaved[name] = f"{error}{remedy}"
        else:
            self._unsaved.pop(name, None)

    @contextmanager
    def _attempt_rows(self, path: Path) -> Iterator[None]:
        """Keep the rows in the buffer if they cannot be written to ``path``."""
        with self.attempt("rows"), save_errors(path):
            yield
        if "rows" in self._unsaved and len(self._buffer) > WAITING_BYTES:
            self._end()

    def close(self) -> None:
        """Write the remaining rows and a last resource row, and close the files; may be called twice."""
        if self._open:
            if not self._ended:
                self._emit_resource()
            self._commit()
            if self._due is None:
                self._write_out()
            self._end()
        self._lock.release()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the writer.

        Raises:
            SaveError: A file of the run could not be written; not raised if another error ended the run.
        """
        self.close()
        if self._unsaved and kind is None:
            raise SaveError(f"the run is over, but not complete on disk: {'; '.join(self._unsaved.values())}")

    def _accepts(self) -> bool:
        if not self._open and "rows" not in self._unsaved:
            raise RowError(f"the writer of run directory '{self.directory}' is closed")
        return self._open

    def _end(self) -> None:
        self._open, self._due = False, None
        self._buffer.clear()
        self._close_file()

    # --- files --------------------------------------------------------------------------------------

    def _write_out(self) -> None:
        """Append the buffered rows to the row file; in a policy training, to the journal of the unfinished
        iteration.
        """
        if not self._buffer:
            return
        path, size = lines_path(self._telemetry, max(self._last, 0)), len(self._buffer)
        if self._trains:
            path = unfinished_path(self._telemetry, self._last + 1) / "run.jsonl"
        with self._attempt_rows(path):
            self._lock.check()
            if self._file is None:
                self._file = open_to_append(path)
                self._last = max(self._last, 0)
            write_all(self._file, self._buffer)
            self._line_bytes += size

    def _close_file(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with self.attempt("last rows"), save_errors(self._telemetry):
                try:
                    os.fsync(file)
                finally:
                    os.close(file)  # Network file systems report a full disk on close.
                flush_to_disk(self._telemetry)

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
        except OSError:  # The directory was deleted; the next write reports it.
            return
        row = ResourceRow(
            rss_mb=_peak_mb(),
            rows_written=self._rows + 1,  # The resource row itself is counted.
            writer_ms=self._busy_seconds * 1e3,
            disk_free_mb=free / 1e6,
        )
        self.emit(row)
        self.on_resources(row)


def _claim(directory: Path) -> None:
    """Create the run directory and its telemetry folder; raise an error if the directory is not empty."""
    with save_errors(directory, RunDirectoryError, kind="run directory ", remedy="; choose another one"):
        make_folder(directory)
        held = sorted(entry.name for entry in directory.iterdir())
        if held:
            listed = ", ".join(held[:3]) + (" and more" if len(held) > 3 else "")
            raise RunDirectoryError(
                f"run directory '{directory}' already holds {listed}; choose another one, or move it away"
            )
        # If two runs start in one directory at the same time, this mkdir() fails for the second.
        (directory / TELEMETRY).mkdir()
        flush_to_disk(directory)


def _peak_mb() -> float:
    """Return the peak resident memory of this process in MB; the operating system reports KiB on Linux and
    bytes on macOS.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
