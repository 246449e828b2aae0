"""Atomic writes: a file or folder is written under a partial name, flushed to disk, then renamed.

Partial names are unpredictable and must be new, so a write never goes through a link that someone else has
planted. A link in place of the final name is replaced by the rename and not followed.
"""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from esper.leyline import EsperError

_PREFIX, _SUFFIX = ".esper-", ".partial"


class SaveError(EsperError):
    """Error: a file could not be written; its previous version is unchanged.

    If only the last step fails, the flush of the folder, the file has its new version.
    """


def write_durably(path: Path, content: bytes | bytearray) -> None:
    """Write ``content`` atomically: a reader sees either the old file or the new one.

    Missing parent folders are created. After the return, the file survives a power failure.

    Raises:
        SaveError: The operating system refused the write.
    """
    partial = partial_of(path)
    with save_errors(path):
        make_folder(path.parent)
        try:
            with partial.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        flush_to_disk(path.parent)


def write_folder_durably(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write a folder of files with the given names: a reader sees the old folder, none, or the new one, and
    never files of both.

    Missing parent folders are created. An older folder is replaced only if all its files have names in
    ``contents``.

    Raises:
        SaveError: The operating system refused the write, or the older folder holds other files.
    """
    folder = folder.absolute()
    new, old = partial_of(folder), partial_of(folder)
    with save_errors(folder):
        make_folder(folder.parent)
        others = sorted({path.name for path in folder.iterdir()} - set(contents)) if folder.exists() else []
        if others:
            raise SaveError(f"'{folder}' also holds {others[0]} and is not replaced; choose another folder")
        try:
            new.mkdir()
            for name, content in contents.items():
                (new / name).write_bytes(content)
            if folder.exists():
                os.replace(folder, old)
            name_folder(new, folder)
        except BaseException:
            with contextlib.suppress(OSError):
                if old.exists() and not folder.exists():
                    os.replace(old, folder)
            raise
        finally:
            with contextlib.suppress(OSError):
                remove(new)
                if folder.exists():
                    remove(old)


@contextlib.contextmanager
def save_errors(
    path: Path, error_type: type[EsperError] = SaveError, *, kind: str = "", remedy: str = ""
) -> Iterator[None]:
    """Convert an ``OSError`` inside the context to an error about ``path``.

    Args:
        path: File or folder that is written.
        error_type: Type of the error to raise.
        kind: Start of the error message, such as "run directory ".
        remedy: End of the error message, such as "; choose another one".
    """
    try:
        yield
    except OSError as error:
        raise error_type(f"{kind}'{path}' cannot be written: {error.strerror}{remedy}") from None


def make_folder(folder: Path) -> None:
    """Create a folder with its parents and flush their names to disk; raises ``OSError``."""
    if not folder.is_dir():
        make_folder(folder.parent)
        if folder.exists():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
        folder.mkdir(exist_ok=True)
        flush_to_disk(folder.parent)


def name_folder(partial: Path, folder: Path) -> None:
    """Flush the folder ``partial`` to disk and rename it to ``folder``; raises ``OSError``."""
    for path in (*partial.iterdir(), partial):
        flush_to_disk(path)
    os.replace(partial, folder)
    flush_to_disk(folder.parent)


def partial_of(path: Path) -> Path:
    """Return a new name in the folder of ``path``, for a file or folder before the final rename."""
    return path.with_name(f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}")


def remove_partials(folder: Path, *, below: bool = False) -> None:
    """Remove partial files and folders that dead processes left in ``folder``; raises ``OSError``.

    No other process may be writing in ``folder``.

    Args:
        folder: Folder of files that were written by ``write_durably``.
        below: Whether to search the folders below, too.
    """
    for partial in [*folder.glob(f"{'**/' if below else ''}{_PREFIX}*{_SUFFIX}")]:
        remove(partial)


def remove(path: Path) -> None:
    """Remove a file, or a folder with its content; raises ``OSError``."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """Flush a file or folder with fsync, so that its content survives a power failure; raises ``OSError``."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
