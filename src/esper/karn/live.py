"""Follows a run while it goes on: a screen on a terminal, plain lines anywhere else.

The trainer hands over rows and never waits for a terminal: ``emit`` only keeps what it needs, and
a slow timer of its own draws. A log gets its lines at once, since they cost microseconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from esper.karn.following import Following
from esper.karn.lines import plain_lines
from esper.karn.screen import render
from esper.leyline.events import Row

REDRAWS_PER_SECOND: Final = 2


class LiveView:
    """The sink that shows a run or a training; use it as a context manager around it."""

    def __init__(
        self, console: Console, *, env: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Show the episodes of environment ``env`` on ``console``; None: the best of a training's iteration."""
        self._console = console
        self._clock = clock
        self._state = Following(env)
        self._lock = threading.Lock()
        self._taken = 0
        self._drawn: tuple[tuple[int, ...], Text] | None = None
        """The last screen, and what it was drawn from."""
        self._logged: set[tuple[type[Row], float]] = set()
        self._logged_before: set[tuple[type[Row], float]] = set()
        """Rows of which a log has its lines from before the view began anew, by their table and time."""
        self._live: Live | None = None
        if can_draw(console):
            self._live = Live(
                console=console, get_renderable=self._draw, refresh_per_second=REDRAWS_PER_SECOND
            )

    def emit(self, row: Row) -> None:
        """Take one row; a terminal shows it within half a second."""
        self.recall([row], aloud=True)

    def recall(self, rows: Iterable[Row], *, age: float = 0.0, aloud: bool = False) -> None:
        """Take rows of ``age`` seconds ago; a log gets their lines only if they are to be said aloud."""
        for row in rows:
            with self._lock:
                followed = self._state.take(row, self._clock() - age)
                self._taken += 1
            if followed and aloud and self._live is None:
                self._log(row)

    def begin_anew(self) -> None:
        """Forget all rows, to take those of a run that went back; a log does not get a line of them again."""
        with self._lock:
            self._state = Following(self._state.env)
        self._logged_before |= self._logged

    def _log(self, row: Row) -> None:
        key = (type(row), row.t)
        if key in self._logged_before:
            return
        self._logged.add(key)
        for line in plain_lines(row, self._state):
            self._write(line)

    def _draw(self) -> Text:
        width, height = self._console.size
        with self._lock:
            self._state.now = self._clock()
            source = (self._taken, int(self._state.now), width, height)
            if self._drawn is None or self._drawn[0] != source:
                # The last line stays free for the cursor, so that nothing scrolls.
                self._drawn = source, render(self._state, width, height - 1)
            return self._drawn[1]

    def _write(self, line: str) -> None:
        """Straight to the console's file: rich's own printing costs as much as all the rest."""
        encoding = self._console.encoding
        file = self._console.file
        file.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        file.flush()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def can_draw(console: Console) -> bool:
    """Whether a screen can be drawn and redrawn on ``console``."""
    return console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
