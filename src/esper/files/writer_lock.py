"""Lock of a run's writer, a file lock that the kernel releases when the writing process ends."""

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import uuid4

from filelock import FileLock, Timeout

from esper.leyline import RunDirectoryError

LOCK_FILE: Final = "writer.lock"
SECONDS: Final = 1.0
"""Seconds for which a writer tries to take the lock; an attempt can fail while ``is_being_written`` briefly
holds a shared lock."""
PAUSE_SECONDS: Final = 0.01


class WriterLock:
    """Exclusive lock on a run directory, held from construction to ``release``.

    Raises:
        RunDirectoryError: Another process holds the lock, or the lock file cannot be written.
    """

    def __init__(self, telemetry: Path) -> None:
        self._path = telemetry / LOCK_FILE
        self._files: list[int] = []
        """Descriptor of the lock file, which filelock passes to ``on_acquired``; empty before."""
        # Readers see only locks of the kernel, so on a file system without them no other kind may be taken.
        self._lock = FileLock(
            self._path,
            SECONDS,
            thread_local=False,
            poll_interval=PAUSE_SECONDS,
            fallback_to_soft=False,
            on_acquired=self._files.append,
        )
        try:
            self._lock.acquire()
        except OSError as error:
            reason = f"cannot be written: {error.strerror}"
            if isinstance(error, Timeout):
                reason = "is being written by another process; let it finish, or stop it"
            raise RunDirectoryError(f"run directory '{telemetry.parent}' {reason}") from error

    def check(self) -> None:
        """Raise ``OSError`` if the folder was deleted, moved or replaced since it was locked."""
        if not self._lock.is_locked or not os.path.samestat(os.fstat(self._files[0]), self._path.stat()):
            raise FileNotFoundError(errno.ENOENT, "its folder was replaced", str(self._path))

    def sign(self) -> None:
        """Write a new signature into the lock file; raises ``OSError``."""
        os.pwrite(self._files[0], uuid4().hex.encode(), 0)

    def release(self) -> None:
        """Release the writer's lock; a second call does nothing."""
        self._lock.release()


def is_being_written(telemetry: Path) -> bool:
    """Return whether a running process holds the writer's lock."""
    # Readers take a shared lock, which filelock does not have: two readers must not see each other as writer.
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
