"""Lock of a run's writer, a file lock that the kernel releases when the writing process ends."""

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import uuid4

from esper.leyline import RunDirectoryError

LOCK_FILE: Final = "writer.lock"
TRIES: Final = 100
PAUSE_SECONDS: Final = 0.01
"""Seconds between attempts to take the writer's lock; an attempt can fail while ``is_being_written`` briefly
holds a shared lock."""


class WriterLock:
    """Exclusive lock on a run directory, held from construction to ``release``.

    Raises:
        RunDirectoryError: Another process holds the lock, or the lock file cannot be written.
    """

    def __init__(self, telemetry: Path) -> None:
        self._file: int | None = None
        self._path = telemetry / LOCK_FILE
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            _lock(self._file)
        except OSError as error:
            self.release()
            reason = f"cannot be written: {error.strerror}"
            if isinstance(error, BlockingIOError):
                reason = "is being written by another process; let it finish, or stop it"
            raise RunDirectoryError(f"run directory '{telemetry.parent}' {reason}") from error

    def check(self) -> None:
        """Raise ``OSError`` if the folder was deleted, moved or replaced since it was locked."""
        if self._file is None or not os.path.samestat(os.fstat(self._file), self._path.stat()):
            raise FileNotFoundError(errno.ENOENT, "its folder was replaced", str(self._path))

    def sign(self) -> None:
        """Write a new signature into the lock file; raises ``OSError``."""
        if self._file is not None:
            os.pwrite(self._file, uuid4().hex.encode(), 0)

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
    with suppress(FileNotFoundError), (telemetry / LOCK_FILE).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def signature(telemetry: Path) -> bytes:
    """Return the signature of the last writer of a run, which differs between any two writers; empty if no
    writer has signed.
    """
    with suppress(FileNotFoundError):
        return (telemetry / LOCK_FILE).read_bytes()
    return b""
