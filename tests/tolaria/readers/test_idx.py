"""Readers of IDX files, plain and compressed, and of folders with four IDX files."""

import gzip
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.tolaria.readers.binary import read_idx, read_labelled_idx
from tests.tolaria.readers.building import (
    IDX_NAMES,
    Bytes,
    idx_bytes,
    mnist_like,
    random_bytes,
    refused,
    write_mnist_like,
)

# Content of an IDX file with element type 08, rank 2, sizes 2 and 3, and six values.
LITERAL = bytes.fromhex("00000802 00000002 00000003 010203040506")
Store = Callable[[bytes], bytes]


def packed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


both = pytest.mark.parametrize("store", [bytes, packed], ids=["plain", "gz"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "values"


@both
def test_idx_file_is_read_as_a_writable_tensor(path: Path, store: Store) -> None:
    path.write_bytes(store(LITERAL))
    values = read_idx(path)
    assert values.dtype == torch.uint8
    values += 1
    assert values.tolist() == [[2, 3, 4], [5, 6, 7]]
    assert read_idx(path).tolist() == [[1, 2, 3], [4, 5, 6]]


@both
@pytest.mark.parametrize("shape", [(), (7,), (2, 1, 3, 2, 2), (1,) * 64])
def test_idx_tensors_of_any_rank_are_read_as_written(
    path: Path, store: Store, shape: tuple[int, ...]
) -> None:
    written = random_bytes(*shape)
    path.write_bytes(store(idx_bytes(written)))
    values = read_idx(path)
    assert values.shape == shape
    np.testing.assert_array_equal(values.numpy(), written)


def test_gzip_file_of_several_members_and_chunks_is_read_completely(path: Path) -> None:
    """Use 2 MB that compress well and 1 MB that does not, read in many chunks of 256 KiB."""
    written = np.concatenate([np.zeros(2 << 20, np.uint8), random_bytes(1 << 20)])
    content = idx_bytes(written)
    path.write_bytes(packed(content[:5]) + packed(b"") + packed(content[5:]))
    np.testing.assert_array_equal(read_idx(path).numpy(), written)


@both
@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (LITERAL[:3], "holds 3 bytes, too few for a header"),
        (LITERAL[:11], "ends in its header, after 11 of 12 bytes"),
        (LITERAL + b"\0", "promises 2 × 3 values in its header and holds more than these 6 bytes"),
        (LITERAL + b"\7" * 1000, "promises 2 × 3 values in its header and holds more than these 6 bytes"),
        (b"\x01" + LITERAL[1:], "starts with the bytes 01 00 08 02; an IDX file of unsigned bytes"),
        (b"\0\0\x0a" + LITERAL[3:], "starts with the bytes 00 00 0a 02"),
        (b"\0\0\x0d\1\0\0\0\1" + b"\1" * 4, "starts with the bytes 00 00 0d 01; an IDX file of"),
        (b"\0\0\x08\2" + struct.pack(">2I", 5, 0), "promises 5 × 0 values in its header; at least one"),
        (b"\0\0\x08\x41" + b"\0\0\0\1" * 65 + b"\7", "states a rank of 65; at most 64 is allowed"),
    ],
)  # fmt: skip
def test_invalid_and_incomplete_idx_files_are_refused(
    path: Path, store: Store, content: bytes, sentence: str
) -> None:
    path.write_bytes(store(content))
    with refused(f"'{path}' {sentence}"):
        read_idx(path)


def test_error_for_a_truncated_idx_file_states_the_number_of_bytes(path: Path) -> None:
    for content in (LITERAL[:17], packed(LITERAL[:17])):
        path.write_bytes(content)
        with refused(f"'{path}' promises 2 × 3 values in its header and holds 5 of 6 bytes"):
            read_idx(path)


def test_gzip_idx_file_with_wrong_checksum_trailing_bytes_or_double_compression_is_refused(
    path: Path,
) -> None:
    whole = packed(LITERAL)
    for tail in (b"\x1f\x8b", b"garbage", packed(b"x")[:-1]):
        path.write_bytes(whole + tail)
        with refused(f"'{path}' ", "again"):
            read_idx(path)
    for place in (-8, -4):  # The last eight bytes of a gzip file are checksum and length.
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with refused(f"'{path}' is damaged (", "copy or download it again"):
            read_idx(path)
    path.write_bytes(packed(whole))
    with refused(f"'{path}' starts with the bytes 1f 8b"):
        read_idx(path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\0\0\x08\3" + b"\xff" * 12 + b"\0" * 100, "promises 4294967295"),
        (packed(b"\0\0\x08\3" + b"\xff" * 12 + b"\0" * 100), "promises 4294967295"),
        # 100 KB of zeros compress to about 130 bytes. At gzip's largest ratio of 1032, 130 bytes may contain
        # 134 KB, so the size in the header is possible and the file is read.
        (
            packed(b"\0\0\x08\1" + struct.pack(">I", 120_000) + b"\0" * 100_000),
            "holds 100000 of 120000 bytes",
        ),
        (
            packed(b"\0\0\x08\1" + struct.pack(">I", 10) + b"\0" * (16 << 20)),
            "holds more than these 10 bytes",
        ),
        (LITERAL, "holds more than these 6 bytes"),
    ],
    ids=["impossible size", "impossible size, gzip", "possible size", "gzip bomb", "sparse gigabyte"],
)
def test_idx_files_with_wrong_sizes_are_refused_before_memory_is_allocated(
    path: Path, content: bytes, sentence: str
) -> None:
    path.write_bytes(content)
    if content == LITERAL:
        os.truncate(path, 1 << 30)  # The sparse file is one gigabyte long, with one block on disk.
    tracemalloc.start()
    try:
        with refused(sentence):
            read_idx(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 21
    finally:
        tracemalloc.stop()


# --- folder of four files -------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_folder_of_four_idx_files_is_read_as_written(tmp_path: Path, packed: bool) -> None:
    arrays = mnist_like(train=5, test=3, height=2, width=3)
    write_mnist_like(tmp_path, arrays, packed=packed)
    train, test = read_labelled_idx(tmp_path)
    for part, count, prefix in ((train, 5, "train"), (test, 3, "t10k")):
        assert part.images.shape == (count, 1, 2, 3)
        assert (part.images.dtype, part.labels.dtype) == (torch.uint8, torch.int64)
        np.testing.assert_array_equal(part.images[:, 0].numpy(), arrays[f"{prefix}-images-idx3-ubyte"])
        assert part.labels.tolist() == arrays[f"{prefix}-labels-idx1-ubyte"].tolist()


def test_plain_idx_file_is_preferred_to_gzip_and_is_named_in_the_error_if_both_are_missing(
    tmp_path: Path,
) -> None:
    arrays = mnist_like()
    write_mnist_like(tmp_path, arrays)
    name = "train-labels-idx1-ubyte"
    (tmp_path / f"{name}.gz").write_bytes(b"ignored")
    assert read_labelled_idx(tmp_path)[0].labels.tolist() == arrays[name].tolist()
    for name in reversed(IDX_NAMES):
        (tmp_path / name).unlink()
        (tmp_path / f"{name}.gz").unlink(missing_ok=True)
        with refused(f"'{tmp_path}' holds neither {name} nor {name}.gz; one of them is needed: put it there"):
            read_labelled_idx(tmp_path)


@pytest.mark.parametrize(
    ("name", "values", "sentence"),
    [
        ("train-labels-idx1-ubyte", random_bytes(4, below=10), "train-labels-idx1-ubyte' 4 labels"),
        ("t10k-images-idx3-ubyte", random_bytes(2, 2, 3), "t10k-images-idx3-ubyte' holds 2 images and "),
        ("train-images-idx3-ubyte", random_bytes(5, 6), "shape 5 × 6; a shape of count × height × width"),
        ("train-labels-idx1-ubyte", np.array(3, np.uint8), "shape one value; a shape of count is needed"),
        ("t10k-images-idx3-ubyte", random_bytes(3, 3, 2), "images of 2 × 3 pixels and test images of 3 × 2"),
        ("t10k-labels-idx1-ubyte", np.array([0, 9, 10], np.uint8), "gives item 2 the label 10; labels"),
    ],
)  # fmt: skip
def test_folder_of_idx_files_with_inconsistent_images_and_labels_is_refused(
    tmp_path: Path, name: str, values: Bytes, sentence: str
) -> None:
    write_mnist_like(tmp_path, mnist_like() | {name: values})
    with refused(sentence):
        read_labelled_idx(tmp_path)
