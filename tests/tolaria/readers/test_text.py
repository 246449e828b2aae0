from pathlib import Path

import pytest
import torch

from esper.tolaria.readers import read_text, windows
from tests.tolaria.readers.building import denied, refused


def test_line_ends_and_every_other_character_stay_as_they_are(tmp_path: Path) -> None:
    content = "a\r\nb\rc\nd\u2028e\u0085f\tä€😀\0\ufeff"
    (tmp_path / "x").write_bytes(content.encode())
    assert read_text(tmp_path / "x") == content


@pytest.mark.parametrize(
    ("content", "offset", "byte"),
    [
        (b"abc\xffdef", 3, "ff"),
        (b"\xfe\xff\0a", 0, "fe"),  # UTF-16
        ("ä".encode() + "ä".encode("latin-1") + b"b", 2, "e4"),
        (b"ab" + "€".encode()[:2], 2, "e2"),  # cut in the middle of a character
        (b"a\xc0\x80", 1, "c0"),  # an overlong zero
        (b"a\xed\xa0\x80", 1, "ed"),  # half of a surrogate pair
    ],
)
def test_bytes_that_are_not_utf8_are_refused_with_their_offset(
    tmp_path: Path, content: bytes, offset: int, byte: str
) -> None:
    (tmp_path / "x").write_bytes(content)
    expected = f"'{tmp_path / 'x'}' cannot be decoded at offset {offset} (byte 0x{byte}, "
    with refused(expected, "; a text file in UTF-8 is expected there: convert it"):
        read_text(tmp_path / "x")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with refused(f"'{tmp_path / 'x'}' is empty; a text file in UTF-8 with at least one character"):
        read_text(tmp_path / "x")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with refused(f"'{tmp_path / 'x'}' does not exist; a text file in UTF-8 is expected there"):
        read_text(tmp_path / "x")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with refused(f"'{tmp_path}' is a folder; a text file in UTF-8"):
        read_text(tmp_path)


def test_permission_denied_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_text("a")
    monkeypatch.setattr(Path, "open", denied)
    with refused(f"'{tmp_path / 'x'}' may not be read (permission denied)"):
        read_text(tmp_path / "x")


def test_targets_are_the_inputs_one_token_on_and_windows_do_not_overlap() -> None:
    # Eight tokens: two windows of three need seven; the eighth is in none.
    inputs, targets = windows(torch.arange(8), 3)
    assert inputs.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert targets.tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(("count", "expected"), [(4, 1), (6, 1), (7, 2), (9, 2), (10, 3)])
def test_the_number_of_windows(count: int, expected: int) -> None:
    inputs, targets = windows(torch.arange(count), 3)
    assert inputs.shape == targets.shape == (expected, 3)


@pytest.mark.parametrize("count", range(4))
def test_a_text_shorter_than_one_context_and_one_is_refused(count: int) -> None:
    with refused(
        f"tokens of shape [{count}] cannot fill one window; 3 of context and one to predict are needed"
    ):
        windows(torch.arange(count), 3)


def test_tokens_in_several_rows_are_refused() -> None:
    with refused("tokens of shape [8, 1] cannot fill one window", "in a row"):
        windows(torch.arange(8).reshape(8, 1), 3)


@pytest.mark.parametrize("context", [0, -1])
def test_a_context_of_nothing_is_refused(context: int) -> None:
    with refused(f"a context of {context} tokens was asked for; ask for at least 1"):
        windows(torch.arange(8), context)
