"""Terminal view of a run in progress: a live screen, or plain lines if the output is not a terminal.

The terminal view reads the run's directory, so any process can show a run. Callers call ``refresh`` after
rows were written. Log lines are written on the caller's thread; a screen is drawn on the thread of rich's
``Live``, where DuckDB releases the GIL. Log lines and screen may use a small share of the run time; rows that
arrive too early for that limit appear with the next update.
"""

import sys
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
from esper.karn.log_lines import Stamp, first_lines, line_of, log, stamps
from esper.karn.questions.overview import progress
from esper.karn.run import Run, open_run
from esper.karn.screen import screen
from esper.leyline import EsperError, RunRow, UpdateRow

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
        """Start the view.

        Args:
            directory: Directory of the run.
            console: Console to write to.
            env: Environment of a training whose slots are shown.
            share_of_time: Largest share of the run time spent on the view.
            skip_past: Do not write lines for rows that are already recorded.
        """
        self._directory = directory
        self._console = console
        self._env = env
        self._share_of_time = share_of_time or (SHARE_OF_DRAWING if can_draw(console) else SHARE_OF_TIME)
        self._run: Run | None = None
        self._lock = threading.Lock()
        self._has_news = False
        """Whether ``refresh`` was called; before the first call, the directory may belong to an earlier run.
        """
        self._is_stale = False
        self._next_look = 0.0
        self._is_last = False
        """Whether the next update is the last update, which must not wait."""
        self._has_begun = False
        self._seen: set[Stamp] = set()
        self._drawn: RenderableType = Text("waiting for the run to begin", style="dim")
        self._width = 0
        self.error: EsperError | None = None
        """Reason why the terminal view stopped; the run itself may continue."""
        if skip_past and (run := self._begun()) is not None:
            self._has_begun, self._seen = True, stamps(run)
        self._live: Live | None = None
        if can_draw(console):
            self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=DRAWS_PER_SECOND)
            self._live.start(refresh=True)

    def refresh(self) -> None:
        """Show new rows soon; blocks the caller for at most its share of the run time."""
        self._has_news = self._is_stale = True
        if self._live is None and time.monotonic() >= self._next_look:
            self._look()

    def close(self) -> None:
        """Show all written rows and restore the terminal."""
        self._is_stale, self._is_last = self._has_news, True
        if self._live is None and self._has_news:
            self._look()
        elif self._live is not None:
            self._live.stop()  # Live.stop() draws the screen once more.

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begun(self) -> Run | None:
        """Return the run once its run row is written, else None."""
        if self._run is None and (self._directory / TELEMETRY).is_dir():
            run = open_run(self._directory)
            self._run = run if run.rows(RunRow) else None
        return self._run

    def _look(self) -> None:
        """Read new rows of the run unless an earlier read failed, and schedule the next read."""
        if self.error is not None:
            return
        try:
            run = self._begun()
            began = time.thread_time()
            if run is not None:
                # The event is cleared before reading, so that rows written during the read trigger another
                # read.
                self._is_stale = False
                if self._live is None:
                    self._write_lines(run)
                else:
                    self._render(run)
        except EsperError as error:
            self.error = error
            sys.stderr.write(f"esper: the run is no longer shown: {error}\n")
            return
        self._next_look = time.monotonic() + (time.thread_time() - began) / self._share_of_time

    def _draw(self) -> RenderableType:
        with self._lock:
            is_resized = self._has_news and self._width != self._console.width
            is_due = self._is_last or time.monotonic() >= self._next_look
            if is_resized or (self._is_stale and is_due):
                self._look()
            return self._drawn

    def _render(self, run: Run) -> None:
        """Render the screen to lines and store the lines; rich would render the tables again on every
        refresh.
        """
        self._width = self._console.width
        lines = self._console.render_lines(screen(run, self._width, self._env), pad=False)
        self._drawn = SegmentLines(lines, new_lines=True)

    def _write_lines(self, run: Run) -> None:
        lines = [] if self._has_begun else first_lines(run.row)
        self._has_begun = True
        entries = log(run, self._seen)
        self._seen.update(entry.stamp for entry in entries)
        updates = [entry for entry in entries if isinstance(entry.row, UpdateRow)]
        for entry in entries:
            # The estimate of the remaining time applies to the last logged iteration only.
            left = progress(run).seconds_left if updates[-1:] == [entry] else None
            line = line_of(entry, run.row, left)
            lines += [] if line is None else [line]
        encoding = self._console.encoding
        for line in lines:
            self._console.file.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        self._console.file.flush()


def can_draw(console: Console) -> bool:
    """Return whether a live screen can be drawn on ``console``."""
    return console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
