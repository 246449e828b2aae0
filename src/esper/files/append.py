"""Files that grow at their end, such as journals and the row file of a run in progress."""

import os
from pathlib import Path


def open_to_append(path: Path) -> int:
    """Open a file for appending and create its folder; raises ``OSError``, also if ``path`` is a link."""
    path.parent.mkdir(exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)


def write_all(file: int, content: bytearray) -> None:
    """Write all bytes to a file; after an ``OSError``, ``content`` has only the bytes that were not
    written.
    """
    while content:
        del content[: os.write(file, content)]
