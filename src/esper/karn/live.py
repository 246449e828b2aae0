"""Follows a run while it goes on: a screen on a terminal, plain lines anywhere else.

The trainer hands over rows and never waits for a terminal: ``emit`` only keeps what it needs, and
a slow timer of its own draws. A log gets its lines at once, since they cost microseconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from esper.karn.following import Following
from esper.karn.lines import plain_lines
from esper.karn.screen import render
from esper.leyline.events import Row

REDRAWS_PER_SECOND: Final = 4


class DrawnView:
    """A view with a screen where one can be drawn, there as long as the view is entered."""

    _live: Live | None = None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


class LiveView(DrawnView):
    """The sink that shows a run; use it as a context manager around the run."""

    def __init__(
        self,
        console: Console,
        *,
        max_epochs: int,
        env: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Show environment ``env``, whose lives last ``max_epochs``, on ``console``."""
        self._console = console
        self._clock = clock
        self._state = Following(max_epochs, env)
        self._lock = threading.Lock()
        if can_draw(console):
            self._live = Live(
                console=console, get_renderable=self._draw, refresh_per_second=REDRAWS_PER_SECOND
            )

    def emit(self, row: Row) -> None:
        """Take one row; a terminal shows it within a quarter of a second."""
        with self._lock:
            followed = self._state.take(row, self._clock())
        if followed and self._live is None:
            for line in plain_lines(row, self._state):
                self._write(line)

    def _draw(self) -> Text:
        width, height = self._console.size
        with self._lock:
            self._state.now = self._clock()
            # The last line stays free for the cursor, so that nothing scrolls.
            return render(self._state, width, height - 1)

    def _write(self, line: str) -> None:
        """Straight to the console's file: rich's own printing costs as much as all the rest."""
        encoding = self._console.encoding
        file = self._console.file
        file.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        file.flush()


def can_draw(console: Console) -> bool:
    """Whether a screen can be drawn and redrawn on ``console``."""
    return console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
