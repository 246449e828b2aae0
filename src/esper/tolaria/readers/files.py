"""Search for data sets, and reading of files and folders.

A data set is searched in $ESPER_DATA, then in the shared data folders of the system. Errors of the operating
system are raised as ``DataError``.
"""

import gzip
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from torch import Tensor

from esper.leyline.errors import DataError

DEFAULT_DATA_DIRS: Final = "/usr/local/share:/usr/share"
AGAIN: Final = "copy or download it again"
TEXT: Final = "a text file in UTF-8"
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


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file with unchanged line ends.

    A text file that was cut off between two characters is accepted, because the cut cannot be detected.
    """
    content = read_bytes(path, TEXT)
    if not content:
        raise DataError(f"'{path}' is empty; {TEXT} with at least one character is expected there")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"'{path}' cannot be decoded at offset {error.start} (byte 0x{content[error.start]:02x},"
            f" {error.reason}); {TEXT} is expected there: convert it, or copy or download it again"
        ) from None


class LabelledImages(NamedTuple):
    """Images and labels of the training or test part of a data set."""

    images: Tensor
    """Images as uint8 ``[N, C, H, W]``."""
    labels: Tensor
    """Labels as int64 ``[N]``."""


def check_labels(labels: Tensor, classes: int, path: Path) -> None:
    """Raise DataError if one of the non-negative labels ``[N]`` is not below the number ``classes``."""
    wrong = (labels >= classes).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise DataError(
            f"'{path}' gives item {place} the label {int(labels[place])}; labels from 0 to {classes - 1} are"
            " allowed: state the right number of classes, or copy or download the file again"
        )


def find_data(name: str, hint: str) -> Path:
    """Return the path of the file or folder ``name`` in the first data folder that has it.

    Args:
        name: Name of the data set.
        hint: Instruction how to install the data set, for the error message.

    Raises:
        DataError: No data folder has the data set, or the data set may not be read.
    """
    own = os.environ.get("ESPER_DATA")
    shared = os.environ.get("XDG_DATA_DIRS") or DEFAULT_DATA_DIRS
    entries = [Path(entry) for entry in shared.split(":")]
    # By the XDG standard, relative folders in XDG_DATA_DIRS are ignored.
    places = [entry / "datasets" / name for entry in entries if entry.is_absolute()]
    if own:
        places.insert(0, Path(own) / name)
    for place in places:
        if _is_there(place, name):
            return place
    unset = "" if own else " ($ESPER_DATA is not set)"
    looked = ", ".join(f"'{place}'" for place in places) or "no place at all"
    raise DataError(f"the data set {name} is missing; looked at {looked}{unset}: {hint}")


def _is_there(place: Path, name: str) -> bool:
    """Return whether the data set exists; raise DataError if it exists but cannot be read."""
    with refusals(place, f"the data set {name}"):
        try:
            if place.is_dir():
                os.listdir(place)
            else:
                open_file(place).close()
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def times(shape: Sequence[int]) -> str:
    """Return a shape as text, such as 3 × 4."""
    return " × ".join(map(str, shape))
