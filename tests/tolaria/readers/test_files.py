"""Access to data files: errors of the operating system become ``DataError``."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from esper.tolaria.readers.files import file_size, list_folder, read_bytes, refusals
from tests.tolaria.readers.building import denied, refused


@pytest.mark.parametrize("look", [read_bytes, file_size, list_folder])
def test_reading_a_missing_path_is_refused(look: Callable[[Path, str], object], tmp_path: Path) -> None:
    with refused(
        f"'{tmp_path / 'x'}' does not exist; a thing is expected there: put it there or name another path"
    ):
        look(tmp_path / "x", "a thing")


def test_reading_a_folder_as_a_file_or_a_file_as_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    for look, path, found in (
        (
            read_bytes,
            tmp_path,
            "is a folder; a thing is expected there: name a file, or take the folder away",
        ),
        (
            list_folder,
            tmp_path / "x",
            "is a file or lies below one; a thing is expected there: name a folder",
        ),
        (read_bytes, tmp_path / "x" / "y", "is a file or lies below one"),
    ):
        with refused(f"'{path}' {found}"):
            look(path, "a thing")


@pytest.mark.parametrize(
    ("owner", "call", "look"),
    [(Path, "open", read_bytes), (Path, "stat", file_size), (os, "listdir", list_folder)],
)
def test_reading_a_path_without_read_permission_is_refused(
    owner: object,
    call: str,
    look: Callable[[Path, str], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "x").touch()
    monkeypatch.setattr(owner, call, denied)
    with refused(
        f"'{tmp_path / 'x'}' may not be read (permission denied)", "give this user the right to read it"
    ):
        look(tmp_path / "x", "a thing")


def test_reading_pipes_link_loops_and_invalid_paths_is_refused(tmp_path: Path) -> None:
    pipe, loop = tmp_path / "pipe", tmp_path / "x"
    os.mkfifo(pipe)
    with refused(f"'{pipe}' cannot be read (neither a file nor a folder); a thing is expected there"):
        read_bytes(pipe, "a thing")
    loop.symlink_to(loop)
    with refused(f"'{loop}' cannot be read ({os.strerror(errno.ELOOP)})", "check the path and the disk"):
        read_bytes(loop, "a thing")
    with refused("cannot be read (", "embedded null"):
        list_folder(Path("a\0b"), "a thing")


def test_disk_error_becomes_a_data_error_with_its_reason_and_other_exceptions_propagate() -> None:
    with refused("'x' cannot be read (Input/output error)"), refusals(Path("x"), "a thing"):
        raise OSError(errno.EIO, "Input/output error")
    with pytest.raises(KeyError), refusals(Path("x"), "a thing"):
        raise KeyError


def test_read_bytes_reads_at_most_limit_bytes(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abcdef")
    assert [read_bytes(tmp_path / "x", "a thing", limit=limit) for limit in (4, 9, -1)] == [
        b"abcd", b"abcdef", b"abcdef",
    ]  # fmt: skip
    assert file_size(tmp_path / "x", "a thing") == 6


def test_list_folder_returns_entries_sorted_by_name_without_hidden_ones(tmp_path: Path) -> None:
    for name in ("b", ".hidden", "a10", "B", "a9"):
        (tmp_path / name).touch()
    assert [path.name for path in list_folder(tmp_path, "a thing")] == ["B", "a10", "a9", "b"]
