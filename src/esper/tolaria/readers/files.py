"""Reading of files and folders; errors of the operating system are raised as ``DataError``."""

import gzip
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from esper.leyline.errors import DataError

AGAIN: Final = "copy or download it again"
GZIP: Final = b"\x1f\x8b"
GREATEST_RATIO: Final = 1032  # Largest compression ratio of the deflate format: 258 bytes in two bits.

FOUND_AND_TO_DO: Final[dict[type[Exception], tuple[str, str]]] = {
    FileNotFoundError: ("does not exist", "put it there or name another path"),
    IsADirectoryError: ("is a folder", "name a file, or take the folder away"),
    NotADirectoryError: ("is a file or lies below one", "name a folder, or take the file away"),
    PermissionError: ("may not be read (permission denied)", "give this user the right to read it"),
}


@contextmanager
def refusals(path: Path, wanted: str) -> Iterator[None]:
    """Convert errors of the operating system into a DataError with the text that ``wanted`` was expected at
    ``path``.

    Only calls to the operating system may run inside the context, since any ``ValueError`` is reported as an
    invalid path.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        other = f"cannot be read ({reason})", "check the path and the disk"
        found, to_do = FOUND_AND_TO_DO.get(type(error), other)
        raise DataError(f"'{path}' {found}; {wanted} is expected there: {to_do}") from error


def open_file(path: Path) -> BinaryIO:
    """Open a regular file; raise OSError for pipes and devices, which could block or never end."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError("neither a file nor a folder")
    return path.open("rb")


def read_bytes(path: Path, wanted: str, *, limit: int = -1) -> bytearray:
    """Return at most ``limit`` bytes of a file, or all if ``limit`` is -1; memory for ``limit`` bytes is
    allocated at once."""
    with refusals(path, wanted), open_file(path) as file:
        return bytearray(file.read(limit))


def read_content(path: Path, wanted: str, *, limit: int) -> bytearray:
    """Return the first ``limit`` bytes of a plain or gzip-compressed file, recognised by its first bytes."""
    with refusals(path, wanted), open_file(path) as file:
        packed = file.read(len(GZIP)) == GZIP
        file.seek(0)
        try:
            return bytearray(gzip.GzipFile(fileobj=file).read(limit) if packed else file.read(limit))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"'{path}' is damaged ({error}); {wanted} is expected there: {AGAIN}") from None


def file_size(path: Path, wanted: str) -> int:
    """Return the size of a file in bytes."""
    with refusals(path, wanted):
        return path.stat().st_size


def list_folder(folder: Path, wanted: str) -> list[Path]:
    """Return the entries of a folder sorted by name, without hidden files such as ``.DS_Store``."""
    with refusals(folder, wanted):
        names = os.listdir(folder)
    return [folder / name for name in sorted(names) if not name.startswith(".")]
