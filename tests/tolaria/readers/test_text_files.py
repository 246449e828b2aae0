"""Reader of text files, and windows of tokens."""

from pathlib import Path

import pytest
import torch

from esper.tolaria.readers.files import read_text
from esper.tolaria.tasks.text import windows
from tests.tolaria.readers.building import refused


def test_characters_of_a_text_file_are_read_unchanged_and_an_empty_file_is_refused(tmp_path: Path) -> None:
    content = "a\r\nb\rc\nd\u2028e\u0085f\tä€😀\0\ufeff"
    (tmp_path / "x").write_bytes(content.encode())
    assert read_text(tmp_path / "x") == content
    (tmp_path / "x").write_bytes(b"")
    with refused(f"'{tmp_path / 'x'}' is empty; a text file in UTF-8 with at least one character"):
        read_text(tmp_path / "x")


@pytest.mark.parametrize(
    ("content", "offset", "byte"),
    [
        (b"abc\xffdef", 3, "ff"),
        (b"\xfe\xff\0a", 0, "fe"),  # These bytes are UTF-16.
        ("ä".encode() + "ä".encode("latin-1") + b"b", 2, "e4"),
        (b"ab" + "€".encode()[:2], 2, "e2"),  # The last character of this file is truncated.
    ],
)
def test_text_file_with_invalid_utf8_is_refused_with_the_offset_of_the_byte(
    tmp_path: Path, content: bytes, offset: int, byte: str
) -> None:
    (tmp_path / "x").write_bytes(content)
    expected = f"'{tmp_path / 'x'}' cannot be decoded at offset {offset} (byte 0x{byte}, "
    with refused(expected, "; a text file in UTF-8 is expected there: convert it"):
        read_text(tmp_path / "x")


def test_targets_of_token_windows_are_inputs_shifted_by_one_and_windows_do_not_overlap() -> None:
    # Two windows of three input tokens need seven of the eight tokens; the last token is not used.
    inputs, targets = windows(torch.arange(8), 3)
    assert inputs.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert targets.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert [len(windows(torch.arange(count), 3)[0]) for count in (4, 6, 7, 9, 10)] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("shape", [[0], [3], [8, 1]])
def test_windows_of_too_few_tokens_or_with_a_context_of_zero_are_refused(shape: list[int]) -> None:
    with refused(
        f"tokens of shape {shape} cannot fill one window; 3 of context and one to predict are needed in"
    ):
        windows(torch.zeros(shape), 3)
    with refused("a context of 0 tokens was asked for; ask for at least 1"):
        windows(torch.arange(8), 0)
