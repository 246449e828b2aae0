"""Files and folders that appear whole: written beside their place, flushed to the disk, then renamed."""

import contextlib
import os
from pathlib import Path

from esper.leyline.errors import EsperError


class SaveError(EsperError):
    """A file that could not be written; what was there before still is."""

    def __init__(self, sentence: str, reason: str | None = None) -> None:
        super().__init__(sentence)
        self.reason = reason
        """What the operating system said."""


def write_durably(path: Path, content: bytes | bytearray) -> None:
    """Write, flush to the disk, then rename: a reader sees the old file or the new one, never a part."""
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
    """Give a folder that was filled under its partial name its own one; raises ``OSError``."""
    partial = partial_of(folder)
    for path in (*partial.iterdir(), partial):
        flush_to_disk(path)
    os.replace(partial, folder)
    flush_to_disk(folder.parent)


def partial_of(path: Path) -> Path:
    """Where a file or folder stands until it is whole."""
    return path.with_name(path.name + ".partial")


def flush_to_disk(path: Path) -> None:
    """Make what was written to a file or folder outlast a power cut; raises ``OSError``."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
