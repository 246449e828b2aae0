"""Terminal view of a run in progress: a live screen, or plain log lines if the output is not a terminal.

The terminal view reads the run's directory, so any process can show the run. The method ``refresh`` of the
terminal view must be called after rows were written. Log lines are written on the caller's thread. The screen
is drawn on the thread of rich's ``Live``, where DuckDB queries release the GIL. The terminal view may use
only a small share of the run time; new rows whose display would exceed this share are shown at a later
update.
"""

import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from rich.console import Console, RenderableType
from rich.live import Live
from rich.segment import SegmentLines
from rich.text import Text

from esper.files.row_files import TELEMETRY
from esper.karn.log_lines import Stamp, first_lines, line_of, log, logged_rows, stamp_of
from esper.karn.run import Run, open_run
from esper.karn.runs import progress
from esper.karn.screen import screen
from esper.leyline import EsperError, RunRow, UpdateRow
from esper.leyline.errors import notify, printable

DRAWS_PER_SECOND: Final = 2
SHARE_OF_TIME: Final = 0.02
"""Share of the run time that reading the files for log lines may take."""
SHARE_OF_DRAWING: Final = 0.05
"""Share of the run time that drawing the screen may take, on a thread of rich."""


class TerminalView(AbstractContextManager["TerminalView"]):
    """Context manager that shows the run in a directory; the directory may not exist yet."""

    def __init__(
        self,
        directory: Path,
        console: Console,
        *,
        env: int | None = None,
        share_of_time: float | None = None,
        skip_past: bool = False,
    ) -> None:
        """Start the terminal view of a run.

        Args:
            directory: Directory of the run.
            console: Console of rich on which the run is shown.
            env: Environment of a policy training whose slots are shown; None shows the best episode.
            share_of_time: Largest share of the run time that the terminal view may use.
            skip_past: Whether to write no log lines for rows that were recorded before this call.
        """
        self._directory = directory
        self._console = console
        self._env = env
        self._share_of_time = share_of_time or (SHARE_OF_DRAWING if can_draw(console) else SHARE_OF_TIME)
        self._run: Run | None = None
        self._lock = threading.Lock()
        self._has_news = False
        """Whether ``refresh`` was called; before its first call, the directory may belong to an earlier
        run.
        """
        self._is_stale = False
        self._next_look = 0.0
        self._seen: set[Stamp] | None = None
        """Stamps (table and time) of the rows with a log line; None before the first log line."""
        self._drawn: RenderableType = Text("waiting for the run to begin", style="dim")
        self._width = 0
        self.error: EsperError | OSError | None = None
        """Reason why the terminal view stopped; the run itself may continue."""
        if skip_past and (run := self._begun()) is not None:
            self._seen = set(map(stamp_of, logged_rows(run)))
        self._live: Live | None = None
        if can_draw(console):
            self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=DRAWS_PER_SECOND)
            self._live.start(refresh=True)

    def refresh(self) -> None:
        """Show new rows of the run with the next drawing. The calling thread spends at most
        ``share_of_time`` of the run time on this method.
        """
        self._has_news = self._is_stale = True
        if self._live is None and time.monotonic() >= self._next_look:
            self._look()

    def close(self) -> None:
        """Show all written rows and restore the terminal."""
        if self._has_news:
            with self._lock:
                self._look()
        if self._live is not None:
            self._live.stop()  # The method stop() of rich's Live draws the screen a last time.

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begun(self) -> Run | None:
        """Return the run once its run row is written, else None."""
        if self._run is None and (self._directory / TELEMETRY).is_dir():
            run = open_run(self._directory)
            self._run = run if run.rows(RunRow) else None
        return self._run

    def _look(self) -> None:
        """Read and show new rows of the run unless an earlier read failed; then set the time of the next
        read.
        """
        if self.error is not None:
            return
        try:
            run = self._begun()
            began = time.thread_time()
            if run is not None:
                # ``_is_stale`` is set to False before the read, so that rows written during the read cause
                # another read.
                self._is_stale = False
                if self._live is None:
                    self._write_lines(run)
                else:
                    self._render(run)
        except BrokenPipeError:
            raise
        except (EsperError, OSError) as error:
            self.error = error
            reason = error.strerror if isinstance(error, OSError) else str(error)
            notify(f"the run is no longer shown: {printable(str(reason))}")
            return
        self._next_look = time.monotonic() + (time.thread_time() - began) / self._share_of_time

    def _draw(self) -> RenderableType:
        with self._lock:
            is_resized = self._has_news and self._width != self._console.width
            if is_resized or (self._is_stale and time.monotonic() >= self._next_look):
                self._look()
            return self._drawn

    def _render(self, run: Run) -> None:
        """Render the screen to lines and store the lines, because rich would render the tables again on every
        refresh.
        """
        self._width = self._console.width
        lines = self._console.render_lines(screen(run, self._width, self._env), pad=False)
        safe = [[segment._replace(text=printable(segment.text)) for segment in line] for line in lines]
        self._drawn = SegmentLines(safe, new_lines=True)

    def _write_lines(self, run: Run) -> None:
        lines = first_lines(run.row) if self._seen is None else []
        self._seen = self._seen or set()
        entries = log(run, self._seen)
        self._seen.update(stamp_of(entry.row) for entry in entries)
        updates = [entry for entry in entries if isinstance(entry.row, UpdateRow)]
        for entry in entries:
            # The estimated remaining time is shown only in the log line of the last iteration.
            left = progress(run).seconds_left if updates[-1:] == [entry] else None
            line = line_of(entry, run.row, left)
            lines += [] if line is None else [line]
        encoding = self._console.encoding
        for line in lines:
            self._console.file.write(printable(line).encode(encoding, "replace").decode(encoding) + "\n")
        self._console.file.flush()


def can_draw(console: Console) -> bool:
    """Return whether a live screen can be drawn on ``console``."""
    return console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
