"""Atomic writes in a folder in which someone else has planted links."""

import os
import secrets
from pathlib import Path

import pytest

from esper.files.append import open_to_append
from esper.files.atomic_write import SaveError, partial_of, write_durably


def test_a_link_in_place_of_a_written_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim, file = tmp_path / "victim", tmp_path / "folder" / "file"
    victim.write_text("mine")
    file.parent.mkdir()
    file.symlink_to(victim)
    write_durably(file, b"new")
    assert (file.read_text(), file.is_symlink(), victim.read_text()) == ("new", False, "mine")
    assert os.listdir(file.parent) == ["file"]


def test_partial_names_differ_and_a_link_of_that_name_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, file = tmp_path / "victim", tmp_path / "file"
    victim.write_text("mine")
    assert len({partial_of(file) for _ in range(100)}) == 100
    monkeypatch.setattr(secrets, "token_hex", lambda size: "guessed")
    partial_of(file).symlink_to(victim)
    with pytest.raises(SaveError, match="File exists"):
        write_durably(file, b"new")
    assert victim.read_text() == "mine"
    assert not file.exists()


def test_a_file_that_grows_is_not_opened_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        open_to_append(tmp_path / "link")
    assert not (tmp_path / "victim").exists()
