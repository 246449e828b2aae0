"""Wrappers of the functions in ``os`` that change files: they count the changes, make a change fail, and
record which content was flushed to disk.

Files opened by ``open``, ``pathlib`` and ``tempfile`` are included, because their classes are replaced by
those of ``_pyio``, which call ``os``. DuckDB writes Parquet files without these functions, into a partial
folder that Esper flushes by ``os.fsync``: the writes of DuckDB are not counted, the flushes are.
"""

import _pyio
import builtins
import errno
import fcntl
import io
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from esper.files.writer_lock import LOCK_FILE

CHANGES = ("open", "write", "pwrite", "fsync", "replace", "unlink", "rmdir", "mkdir", "truncate", "ftruncate")
FREEING = ("unlink", "rmdir", "truncate", "ftruncate")
"""Functions of ``os`` that succeed on a full disk."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
Fault = Literal["full disk", "no permission"]


class Disk:
    """Current folder of this process, in which all changes to files are counted.

    Args:
        before: Function that is called before every change; changes made by this function are not counted.
    """

    def __init__(self, before: Callable[[], None]) -> None:
        self.changes = 0
        """Number of file changes so far, including the change that is about to be made."""
        self.fault: Fault | None = None
        """Simulated fault; a full disk makes all changes that need space fail, "no permission" only one."""
        self._before = before
        self._is_off = False
        self._open: dict[int, tuple[str, int]] = {}
        """Path and flags of every open file descriptor."""
        self._files: dict[int, bytes] = {}
        """Content that every file had when it was last flushed, by inode."""
        self._folders: dict[int, dict[str, int]] = {}
        """Entries (name and inode) that every folder had when it was last flushed, by inode of the folder."""
        self._pinned: dict[int, int] = {}
        """Open descriptor of every file and folder seen, by inode, so that no inode number is used again."""
        self._real = {name: getattr(os, name) for name in (*CHANGES, "close")}
        self._real["fsync"] = lambda file: None  # Flushed content is only recorded.
        self._root = os.stat(".").st_ino
        self._begun_in = f"{os.getcwd()}/"
        self._flush_all(Path())

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch all changes that this process makes inside the context."""
        patches = [mock.patch.object(os, name, self._watched(name)) for name in CHANGES]
        patches += [mock.patch.object(os, "close", self._close)]
        patches += [mock.patch.object(owner, "open", _pyio.open) for owner in (io, builtins)]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        self._is_off, before = True, self._is_off
        try:
            yield
        finally:
            self._is_off = before

    def _watched(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(*args: Any, **options: Any) -> Any:
            if self._is_off:
                return real(*args, **options)
            if name == "open":  # filelock opens its file by the absolute path, which a copy does not have.
                args = (os.fspath(args[0]).removeprefix(self._begun_in), *args[1:])
            if name != "open" or args[1] & WRITING:
                self.changes += 1
                with self.unwatched():
                    try:
                        self._before()
                    except OSError as error:  # The command under test would handle an OSError like a fault.
                        raise AssertionError("the shim failed") from error
                self._refuse(name)
            found = real(*args, **options)
            if name == "open":
                folder = self._open[options["dir_fd"]][0] if options.get("dir_fd") is not None else ""
                self._open[found] = os.path.join(folder, args[0]), args[1]
            elif name == "fsync":
                with self.unwatched():
                    self._flushed(Path(self._open[args[0]][0]), args[0])
            return found

        return call

    def _close(self, file: int) -> None:
        self._open.pop(file, None)
        self._real["close"](file)

    def _refuse(self, name: str) -> None:
        if self.fault == "full disk" and name not in FREEING:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.fault == "no permission":
            self.fault = None
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    # --- files after a power failure ----------------------------------------------------------------

    def _flushed(self, path: Path, file: int) -> None:
        found = os.fstat(file)
        self._pin(path, found.st_ino)
        if stat.S_ISDIR(found.st_mode):
            names = {entry.name: entry.inode() for entry in os.scandir(path)}
            self._folders[found.st_ino] = names
            for name, number in names.items():
                self._pin(path / name, number)
        else:
            self._files[found.st_ino] = path.read_bytes()

    def _pin(self, path: Path, number: int) -> None:
        if number not in self._pinned:
            self._pinned[number] = self._real["open"](path, os.O_RDONLY)

    def _flush_all(self, folder: Path) -> None:
        for path in (folder, *folder.rglob("*")):
            self._pin(path, path.stat().st_ino)
            self._flushed(path, self._pinned[path.stat().st_ino])

    def durable(self, target: Path) -> None:
        """Write the files as they would be after a power failure to ``target``: only flushed content."""
        self._restore(self._root, target)

    def _restore(self, number: int, target: Path) -> None:
        target.mkdir()
        for name, entry in self._folders.get(number, {}).items():
            if entry in self._files:
                (target / name).write_bytes(self._files[entry])
            elif stat.S_ISDIR(os.fstat(self._pinned[entry]).st_mode):
                self._restore(entry, target / name)
            else:
                (target / name).touch()

    # --- a process in a copy of the folder ----------------------------------------------------------

    def move_to(self, copy: Path) -> None:
        """Change to ``copy``, a copy of the current folder, and reopen all open files there."""
        os.chdir(copy)
        for file, (name, flags) in self._open.items():
            # A removed file is replaced by the null device.
            path = name if os.path.exists(name) else os.devnull
            position = None if flags & os.O_APPEND or os.path.isdir(path) else os.lseek(file, 0, os.SEEK_CUR)
            again = self._real["open"](path, flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC))
            os.dup2(again, file, inheritable=False)
            self._real["close"](again)
            if position is not None:
                os.lseek(file, position, os.SEEK_SET)
            if path.endswith(LOCK_FILE):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def copy_of(folder: Path, target: Path) -> Path:
    """Copy a folder to the new folder ``target``."""
    return Path(shutil.copytree(folder, target, symlinks=True))
