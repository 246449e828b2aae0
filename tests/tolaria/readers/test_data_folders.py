"""Search for data sets in $ESPER_DATA and $XDG_DATA_DIRS."""

import os
from pathlib import Path

import pytest

from esper.tolaria.readers.files import find_data
from tests.tolaria.readers.building import denied, refused

HINT = "install the package dataset-thing"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own").mkdir()
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "own"))
    return tmp_path / "own"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Set $XDG_DATA_DIRS to two folders, of which only the first has a folder ``datasets``."""
    (tmp_path / "one" / "datasets").mkdir(parents=True)
    (tmp_path / "two").mkdir()
    monkeypatch.setenv("XDG_DATA_DIRS", f"{tmp_path / 'one'}:{tmp_path / 'two'}")
    return tmp_path / "one", tmp_path / "two"


def test_data_sets_are_searched_in_esper_data_before_shared_data_folders(
    own: Path, shared: tuple[Path, Path]
) -> None:
    places = [own / "thing", shared[0] / "datasets" / "thing", shared[1] / "datasets" / "thing"]
    for place in reversed(places):
        place.mkdir(parents=True)
        assert find_data("thing", HINT) == place


def test_error_for_a_missing_data_set_names_all_searched_folders_and_a_hint(
    own: Path, shared: tuple[Path, Path]
) -> None:
    looked = ", ".join(f"'{place}'" for place in (own / "x", *(entry / "datasets" / "x" for entry in shared)))
    with refused(f"the data set x is missing; looked at {looked}: {HINT}"):
        find_data("x", HINT)


@pytest.mark.parametrize("unset", [None, ""])
def test_default_data_folders_are_searched_if_the_environment_variables_are_unset_or_empty(
    own: Path, shared: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, unset: str | None
) -> None:
    def forget(name: str) -> None:
        if unset is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, unset)

    forget("ESPER_DATA")
    looked = f"'{shared[0]}/datasets/x', '{shared[1]}/datasets/x'"
    with refused(f"looked at {looked} ($ESPER_DATA is not set): {HINT}"):
        find_data("x", HINT)
    monkeypatch.setenv("ESPER_DATA", str(own))
    forget("XDG_DATA_DIRS")
    default = "'/usr/local/share/datasets/no-such-thing', '/usr/share/datasets/no-such-thing'"
    with refused(f"looked at '{own}/no-such-thing', {default}: {HINT}"):
        find_data("no-such-thing", HINT)


def test_relative_and_empty_entries_of_the_environment_variables_for_data_folders_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: tuple[Path, Path]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ESPER_DATA", raising=False)
    monkeypatch.setenv("XDG_DATA_DIRS", f"::one:{shared[1]}:")
    # A search of the relative entry ``one`` of $XDG_DATA_DIRS would find this folder.
    (shared[0] / "datasets" / "x").mkdir()
    with refused(f"looked at '{shared[1]}/datasets/x' ($ESPER_DATA is not set): {HINT}"):
        find_data("x", HINT)
    monkeypatch.setenv("XDG_DATA_DIRS", "one")
    with refused(f"looked at no place at all ($ESPER_DATA is not set): {HINT}"):
        find_data("x", HINT)


def test_search_for_a_data_set_skips_dangling_links_and_files_where_a_folder_is_expected(
    own: Path, shared: tuple[Path, Path]
) -> None:
    (own / "x").symlink_to(own / "nowhere")
    (shared[1] / "datasets").touch()
    (shared[0] / "datasets" / "x").mkdir()
    assert find_data("x", HINT) == shared[0] / "datasets" / "x"
    (shared[0] / "datasets" / "x").rmdir()
    with refused("the data set x is missing"):
        find_data("x", HINT)


@pytest.mark.usefixtures("shared")
def test_search_finds_a_nested_data_file_and_refuses_one_without_read_permission(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own / "a").mkdir()
    (own / "a" / "b.txt").touch()
    assert find_data("a/b.txt", HINT) == own / "a" / "b.txt"
    for owner, call, name in ((os, "listdir", "a"), (Path, "open", "a/b.txt"), (Path, "stat", "a")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, call, denied)
            with refused(
                f"'{own / name}' may not be read (permission denied); the data set {name} is expected"
            ):
                find_data(name, HINT)
