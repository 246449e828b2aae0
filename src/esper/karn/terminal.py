"""Shows a run on the terminal while it goes on: a screen, or plain lines where there is no terminal.

Both are answers about the run's directory, so that a view shows what every other one does, from any process.
Whoever runs or watches calls ``refresh`` when something was written. Lines are then written by the caller's
thread, a screen is drawn by the thread that rich's ``Live`` keeps: the database works without Python's lock.
Each takes a small share of the time at most; what comes too early for that is shown with what follows.
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

from esper.karn.log_lines import Stamp, first_lines, line_of, log, stamps
from esper.karn.questions.overview import progress
from esper.karn.run import Run, open_run
from esper.karn.screen import screen
from esper.leyline.errors import EsperError
from esper.leyline.events import RunRow, UpdateRow
from esper.leyline.run_files import TELEMETRY

DRAWS_PER_SECOND: Final = 2
SHARE_OF_TIME: Final = 0.02
"""That looking at the files for lines may take."""
SHARE_OF_DRAWING: Final = 0.05
"""The same for screens, in a thread of their own."""


class TerminalView(AbstractContextManager["TerminalView"]):
    """The run in a directory, which need not be there yet; use it as a context manager."""

    def __init__(
        self,
        directory: Path,
        console: Console,
        *,
        env: int | None = None,
        share_of_time: float | None = None,
        skip_past: bool = False,
    ) -> None:
        """Of a training, ``env`` is the environment whose slots are shown.

        With ``skip_past`` there are no lines of what is recorded already.
        """
        self._directory = directory
        self._console = console
        self._env = env
        self._share_of_time = share_of_time or (SHARE_OF_DRAWING if can_draw(console) else SHARE_OF_TIME)
        self._run: Run | None = None
        self._lock = threading.Lock()
        self._has_news = False
        """Whether there is something to show: until then the directory may be another run's."""
        self._is_stale = False
        self._next_look = 0.0
        self._is_last = False
        """Whether the next look is the last one, and due at once."""
        self._has_begun = False
        self._seen: set[Stamp] = set()
        self._drawn: RenderableType = Text("waiting for the run to begin", style="dim")
        self._width = 0
        self.error: EsperError | None = None
        """Why the run cannot be shown any more; it may go on nevertheless."""
        if skip_past and (run := self._begun()) is not None:
            self._has_begun, self._seen = True, stamps(run)
        self._live: Live | None = None
        if can_draw(console):
            self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=DRAWS_PER_SECOND)
            self._live.start(refresh=True)

    def refresh(self) -> None:
        """Show what is new, soon: a caller is held up for its share of the time at most."""
        self._has_news = self._is_stale = True
        if self._live is None and time.monotonic() >= self._next_look:
            self._look()

    def close(self) -> None:
        """Show everything that is written, and leave the terminal as it was."""
        self._is_stale, self._is_last = self._has_news, True
        if self._live is None and self._has_news:
            self._look()
        elif self._live is not None:
            self._live.stop()  # draws once more

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begun(self) -> Run | None:
        """The run, once it has written its own row."""
        if self._run is None and (self._directory / TELEMETRY).is_dir():
            run = open_run(self._directory)
            self._run = run if run.rows(RunRow) else None
        return self._run

    def _look(self) -> None:
        """Read what is new, unless that has failed before, and decide when to do so again."""
        if self.error is not None:
            return
        try:
            run = self._begun()
            began = time.thread_time()
            if run is not None:
                self._is_stale = False  # before reading: what is written meanwhile is read later
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
        """Ask all questions and keep the lines of the screen: rich would make them anew for every drawing."""
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
            # How long it takes from here on is known of the last iteration only.
            left = progress(run).seconds_left if updates[-1:] == [entry] else None
            line = line_of(entry, run.row, left)
            lines += [] if line is None else [line]
        encoding = self._console.encoding
        for line in lines:
            self._console.file.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        self._console.file.flush()


def can_draw(console: Console) -> bool:
    """Whether a screen can be drawn and redrawn on ``console``."""
    return console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
