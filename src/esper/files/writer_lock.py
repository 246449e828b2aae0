"""Lock of a run's writer, a file lock that the kernel releases when the writing process ends."""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from esper.leyline.errors import RunDirectoryError

LOCK_FILE: Final = "writer.lock"
TRIES: Final = 100
PAUSE_SECONDS: Final = 0.01
"""Seconds between tries to lock; ``is_being_written`` briefly holds a shared lock, so a try may fail."""


class WriterLock:
    """Exclusive lock on a run directory, held from construction to ``release``.

    Raises:
        RunDirectoryError: Another process holds the lock, or the lock file cannot be written.
    """

    def __init__(self, telemetry: Path) -> None:
        self._file: int | None = None
        try:
            self._file = os.open(telemetry / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
            _lock(self._file)
        except OSError as error:
            self.release()
            is_held = isinstance(error, BlockingIOError)
            reason = "is being written by another process; let it finish, or stop it"
            reason = reason if is_held else f"cannot be written: {error.strerror}"
            raise RunDirectoryError(f"run directory '{telemetry.parent}' {reason}") from error

    def release(self) -> None:
        """Release the writer's lock; a second call does nothing."""
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)


def _lock(file: int) -> None:
    for _ in range(TRIES - 1):
        with suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(PAUSE_SECONDS)
    return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_being_written(telemetry: Path) -> bool:
    """Return whether a running process holds the writer's lock."""
    try:
        with (telemetry / LOCK_FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
