import errno
import os
import re
from pathlib import Path

import pytest

from esper.leyline.errors import DataError
from esper.tolaria.readers.files import file_size, list_folder, read_bytes, refusals
from tests.tolaria.readers.building import denied, refused


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    expected = (
        f"'{tmp_path / 'x'}' does not exist; a thing is expected there: put it there or name another path"
    )
    with pytest.raises(DataError, match=f"^{re.escape(expected)}$"):
        read_bytes(tmp_path / "x", "a thing")
    with pytest.raises(DataError, match=f"^{re.escape(expected)}$"):
        file_size(tmp_path / "x", "a thing")
    with pytest.raises(DataError, match=f"^{re.escape(expected)}$"):
        list_folder(tmp_path / "x", "a thing")


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with refused(
        f"'{tmp_path}' is a folder; a thing is expected there: name a file, or take the folder away"
    ):
        read_bytes(tmp_path, "a thing")


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with refused(f"'{tmp_path / 'x'}' is a file or lies below one; a thing is expected there: name a folder"):
        list_folder(tmp_path / "x", "a thing")
    with refused(f"'{tmp_path / 'x' / 'y'}' is a file or lies below one"):
        read_bytes(tmp_path / "x" / "y", "a thing")


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").touch()
    monkeypatch.setattr(Path, "open", denied)
    with refused(
        f"'{tmp_path / 'x'}' may not be read (permission denied)", "give this user the right to read it"
    ):
        read_bytes(tmp_path / "x", "a thing")


def test_a_folder_that_may_not_be_searched_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "stat", denied)
    with refused(f"'{tmp_path / 'x'}' may not be read (permission denied)"):
        read_bytes(tmp_path / "x", "a thing")
    with refused(f"'{tmp_path / 'x'}' may not be read (permission denied)"):
        file_size(tmp_path / "x", "a thing")


def test_a_folder_that_may_not_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", denied)
    with refused(f"'{tmp_path}' may not be read (permission denied)"):
        list_folder(tmp_path, "a thing")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with refused(
        f"'{tmp_path / 'pipe'}' cannot be read (neither a file nor a folder); a thing is expected there"
    ):
        read_bytes(tmp_path / "pipe", "a thing")


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to(tmp_path / "x")
    with refused(
        f"'{tmp_path / 'x'}' cannot be read ({os.strerror(errno.ELOOP)})", "check the path and the disk"
    ):
        read_bytes(tmp_path / "x", "a thing")


def test_a_path_that_no_system_takes_is_refused() -> None:
    with refused("cannot be read (", "embedded null"):
        read_bytes(Path("a\0b"), "a thing")
    with refused("cannot be read (", "embedded null"):
        list_folder(Path("a\0b"), "a thing")


def test_a_failing_disk_is_refused_with_its_reason() -> None:
    with refused("'x' cannot be read (Input/output error)"), refusals(Path("x"), "a thing"):
        raise OSError(errno.EIO, "Input/output error")


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), refusals(Path("x"), "a thing"):
        raise KeyError


def test_a_limit_cuts_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abcdef")
    assert read_bytes(tmp_path / "x", "a thing", limit=4) == b"abcd"
    assert read_bytes(tmp_path / "x", "a thing", limit=9) == b"abcdef"
    assert read_bytes(tmp_path / "x", "a thing") == b"abcdef"
    assert file_size(tmp_path / "x", "a thing") == 6


def test_a_folder_is_listed_in_the_order_of_names_without_hidden_entries(tmp_path: Path) -> None:
    for name in ("b", ".hidden", "a10", "B", "a9"):
        (tmp_path / name).touch()
    assert [path.name for path in list_folder(tmp_path, "a thing")] == ["B", "a10", "a9", "b"]
