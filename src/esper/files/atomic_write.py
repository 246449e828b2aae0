"""Atomic writes: a file or folder is written under a partial name, flushed to disk, then renamed."""

import contextlib
import os
from pathlib import Path

from esper.leyline.errors import EsperError


class SaveError(EsperError):
    """A file could not be written; its previous version is unchanged."""

    def __init__(self, sentence: str, reason: str | None = None) -> None:
        super().__init__(sentence)
        self.reason = reason
        """Message of the operating system that explains the failed write, or None."""


def write_durably(path: Path, content: bytes | bytearray) -> None:
    """Write ``content`` atomically: a reader sees either the old file or the new one.

    Raises:
        SaveError: The operating system refused the write.
    """
    partial = partial_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise SaveError(f"'{path}' cannot be written: {error.strerror}", error.strerror) from None


def name_folder(folder: Path) -> None:
    """Flush the folder ``partial_of(folder)`` to disk and rename it to ``folder``; raises ``OSError``."""
    partial = partial_of(folder)
    for path in (*partial.iterdir(), partial):
        flush_to_disk(path)
    os.replace(partial, folder)
    flush_to_disk(folder.parent)


def partial_of(path: Path) -> Path:
    """Return the name under which a file or folder is written before the final rename."""
    return path.with_name(path.name + ".partial")


def flush_to_disk(path: Path) -> None:
    """Flush a file or folder with fsync, so that its content survives a power failure; raises ``OSError``."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
