"""One line in a terminal or notebook that shows the position in a training and the time left."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final, TextIO

from esper.leyline.errors import GrowthWarning

INTERVAL: Final = 0.1
"""Smallest number of seconds between two updates of the line."""


class ProgressLine:
    """Line that overwrites itself by a carriage return, which terminals and notebooks understand.

    Args:
        stream: Output of the line, such as ``sys.stderr``.
        clock: Function that returns seconds.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream: TextIO | None = stream
        self._clock = clock
        self._began: tuple[float, float] | None = None
        """Time and fraction of the training at the first update, which a resumed training begins above 0."""
        self._shown = -math.inf
        self._width = 0

    def update(self, fraction: float, text: str) -> None:
        """Show ``text`` and the time left after ``fraction`` of the training, unless the last update was a
        moment ago."""
        now = self._clock()
        if self._began is None:
            self._began = (now, fraction)
        began, first = self._began
        if now - self._shown < INTERVAL:
            return
        self._shown = now
        if fraction > first:
            left = (now - began) * max(1.0 - fraction, 0.0) / (fraction - first)
            text += f", {timedelta(seconds=round(left))} left"
        line = text[: shutil.get_terminal_size().columns - 1]
        self._write(f"\r{line:<{self._width}}")
        self._width = len(line)

    def clear(self) -> None:
        """Erase the line, so that other output can be printed."""
        if self._width:
            self._write(f"\r{'':<{self._width}}\r")
        self._width = 0

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            self._stream = None
            GrowthWarning.issue(f"the progress cannot be shown: {error.strerror}; the training continues")
