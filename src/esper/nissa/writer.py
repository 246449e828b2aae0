"""Writes a run's rows to its directory: the end of a step's line, on the trainer's own thread.

A row is encoded at once and reaches the operating system at ``flush``, which the runner calls
after each epoch: a killed process loses the epoch in progress and leaves at most one torn last
line per table. No queue and no thread, so no row is dropped while the disk works; when it does
not, telemetry ends with one warning and training goes on.
"""

from __future__ import annotations

import resource
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from esper.leyline.columns import TABLE_OF
from esper.leyline.errors import RunDirectoryError
from esper.leyline.events import TABLES_OF_DETAIL, Detail, ResourceRow, Row
from esper.nissa.part import RowError, TablePart

RESOURCE_SECONDS: Final = 10.0
"""Least time between two resource rows."""


class RunWriter:
    """The sink that keeps a run: one append-only file of JSON lines per table."""

    def __init__(
        self,
        directory: Path,
        warn: Callable[[str], None] | None = None,
        *,
        resume_from: Mapping[str, int] | None = None,
        detail: Detail = "full",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Claim ``directory``, made if need be; ``warn`` is told once if writing fails later.

        With ``resume_from``, the ``sizes`` of an earlier writer, its files are continued from there and
        what was written later is cut off.
        """
        self.directory = directory
        self.detail: Detail = detail
        """Rows of tables that are not part of this level are dropped."""
        self.failed = False
        telemetry = _claim(directory) if resume_from is None else directory / "telemetry"
        self._parts = {row_type: TablePart(telemetry, table) for row_type, table in TABLE_OF.items()}
        if resume_from is not None:
            self._cut(resume_from)
        self._warn = warn or _warn_on_stderr
        self._open = True
        self._rows = 0
        self._busy_seconds = 0.0
        self._resource_due = RESOURCE_SECONDS
        self._clock = clock
        self._began = clock()

    def _cut(self, sizes: Mapping[str, int]) -> None:
        try:
            for row_type, part in self._parts.items():
                part.cut(sizes.get(TABLE_OF[row_type], 0))
        except OSError as error:
            raise RunDirectoryError(
                f"run directory '{self.directory}' cannot be written: {error.strerror}"
            ) from error

    def sizes(self) -> dict[str, int]:
        """Bytes on disk by table; to be stored with a checkpoint after ``flush``."""
        return {TABLE_OF[row_type]: part.size for row_type, part in self._parts.items()}

    def emit(self, row: Row) -> None:
        """Stamp the row's time and take it; it reaches the disk at the next ``flush``."""
        if not self._accepts() or TABLE_OF.get(type(row), "run") not in TABLES_OF_DETAIL[self.detail]:
            return
        now = self._clock()
        row.t = round(now - self._began, 6)
        part = self._parts.get(type(row))
        if part is None:
            raise RowError(f"{type(row).__name__} belongs to no table of leyline.events.TABLES")
        part.append(row)
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
        if now - self._began >= self._resource_due:
            self._emit_resource()
        self._write_out()
        self._busy_seconds += self._clock() - now

    def close(self) -> None:
        """Write what is left and a last resource row; closing twice does nothing."""
        if self._open:
            self._emit_resource()
            self._write_out()
            self._close_parts()

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
        self._resource_due = self._clock() - self._began + RESOURCE_SECONDS
        self.emit(
            ResourceRow(
                rss_mb=_peak_mb(),
                rows_written=self._rows + 1,  # with this one
                writer_ms=self._busy_seconds * 1e3,
                disk_free_mb=shutil.disk_usage(self.directory).free / 1e6,
            )
        )

    def _write_out(self) -> None:
        for part in self._parts.values():
            try:
                part.write_out()
            except OSError as error:
                self._fail(part.path, error)
                return

    def _close_parts(self) -> None:
        self._open = False
        for part in self._parts.values():
            try:
                part.close()
            except OSError as error:  # network file systems report a full disk here
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


def _claim(directory: Path) -> Path:
    """Make the run's directory and the one for telemetry in it, which is returned."""
    telemetry = directory / "telemetry"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        held = sorted(entry.name for entry in directory.iterdir())
        if held:
            listed = ", ".join(held[:3]) + (" and more" if len(held) > 3 else "")
            raise RunDirectoryError(
                f"run directory '{directory}' already holds {listed}; choose another one, or move it away"
            )
        telemetry.mkdir()  # of two runs that start at once, the second fails here
    except OSError as error:
        raise RunDirectoryError(
            f"run directory '{directory}' cannot be written: {error.strerror}; choose another one"
        ) from error
    return telemetry


def _peak_mb() -> float:
    """Largest resident memory so far; Linux counts it in KiB, macOS in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def _warn_on_stderr(message: str) -> None:
    sys.stderr.write(f"esper: {message}\n")
