import gzip
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.tolaria.readers import read_idx, read_labelled_idx
from tests.tolaria.readers.building import (
    IDX_NAMES,
    Bytes,
    denied,
    idx_bytes,
    mnist_like,
    random_bytes,
    refused,
    write_mnist_like,
)

# Two rows of three: the type 08, the rank 2, the sizes 2 and 3, six values.
LITERAL = bytes.fromhex("00000802 00000002 00000003 010203040506")
WHOLE = 4 + 8 + 6


def packed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def as_it_is(content: bytes) -> bytes:
    return content


both = pytest.mark.parametrize("store", [as_it_is, packed], ids=["plain", "gz"])
Store = Callable[[bytes], bytes]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "values"


@both
def test_a_file_worked_by_hand_is_read(path: Path, store: Store) -> None:
    path.write_bytes(store(LITERAL))
    values = read_idx(path)
    assert values.dtype == torch.uint8
    assert values.tolist() == [[1, 2, 3], [4, 5, 6]]


@both
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (2, 3, 5), (2, 1, 3, 2, 2)])
def test_any_rank_comes_back_as_written(path: Path, store: Store, shape: tuple[int, ...]) -> None:
    written = random_bytes(*shape)
    path.write_bytes(store(idx_bytes(written)))
    values = read_idx(path)
    assert values.shape == shape
    np.testing.assert_array_equal(values.numpy(), written)


@pytest.mark.parametrize(("name", "store"), [("x.gz", as_it_is), ("x-ubyte", packed)])
def test_the_content_tells_what_is_packed_and_not_the_suffix(tmp_path: Path, name: str, store: Store) -> None:
    (tmp_path / name).write_bytes(store(LITERAL))
    assert read_idx(tmp_path / name).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_a_packed_file_of_several_members_is_read_whole(path: Path) -> None:
    path.write_bytes(packed(LITERAL[:5]) + packed(LITERAL[5:15]) + packed(b"") + packed(LITERAL[15:]))
    assert read_idx(path).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_packed_content_larger_than_a_chunk_is_read_whole(path: Path) -> None:
    """2 MB that compress well and 1 MB that do not, over many chunks of 256 KiB."""
    written = np.concatenate([np.zeros(2 << 20, np.uint8), random_bytes(1 << 20)])
    path.write_bytes(packed(idx_bytes(written)))
    np.testing.assert_array_equal(read_idx(path).numpy(), written)


@both
def test_what_was_read_is_writable_and_not_tied_to_the_file(path: Path, store: Store) -> None:
    path.write_bytes(store(LITERAL))
    values = read_idx(path)
    values += 1
    assert read_idx(path).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_a_missing_file_is_refused(path: Path) -> None:
    with refused(
        f"'{path}' does not exist; an IDX file of unsigned bytes, plain or gzip-compressed, is expected"
    ):
        read_idx(path)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with refused(f"'{tmp_path}' is a folder; an IDX file"):
        read_idx(tmp_path)


def test_permission_denied_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(LITERAL)
    monkeypatch.setattr(Path, "open", denied)
    with refused(f"'{path}' may not be read (permission denied)"):
        read_idx(path)


@both
@pytest.mark.parametrize("length", range(4))
def test_a_file_too_short_for_a_magic_is_refused(path: Path, store: Store, length: int) -> None:
    path.write_bytes(store(LITERAL[:length]))
    with refused(f"'{path}' holds {length} bytes, too few for a header", "copy or download it again"):
        read_idx(path)


@both
@pytest.mark.parametrize("length", range(4, 12))
def test_a_file_that_ends_in_its_header_is_refused(path: Path, store: Store, length: int) -> None:
    path.write_bytes(store(LITERAL[:length]))
    with refused(f"'{path}' ends in its header, after {length} of 12 bytes", "copy or download it again"):
        read_idx(path)


@pytest.mark.parametrize("length", range(12, WHOLE))
def test_a_plain_file_that_ends_in_its_values_is_refused(path: Path, length: int) -> None:
    path.write_bytes(LITERAL[:length])
    with refused(f"'{path}' promises 2 × 3 values in its header and cannot hold them in its {length} bytes"):
        read_idx(path)


@pytest.mark.parametrize("length", range(12, WHOLE))
def test_packed_content_that_ends_in_its_values_is_refused(path: Path, length: int) -> None:
    path.write_bytes(packed(LITERAL[:length]))
    with refused(f"'{path}' promises 2 × 3 values in its header and holds {length - 12} of 6 bytes"):
        read_idx(path)


@both
@pytest.mark.parametrize("tail", [b"\0", b"\x07" * 1000])
def test_bytes_after_the_values_are_refused(path: Path, store: Store, tail: bytes) -> None:
    path.write_bytes(store(LITERAL + tail))
    with refused(f"'{path}' promises 2 × 3 values in its header and holds more than these 6 bytes"):
        read_idx(path)


@pytest.mark.parametrize("tail", [b"\0", b"\0" * 512, b"\x1f", b"\x1f\x8b", b"garbage", packed(b"x")[:-1]])
def test_bytes_after_the_packed_data_are_refused(path: Path, tail: bytes) -> None:
    path.write_bytes(packed(LITERAL) + tail)
    with refused(f"'{path}' ", "again"):
        read_idx(path)


def test_every_prefix_of_a_packed_file_is_refused(path: Path) -> None:
    content = packed(LITERAL)
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with refused(f"'{path}' "):
            read_idx(path)


@pytest.mark.parametrize("place", [-8, -4], ids=["checksum", "length"])
def test_a_packed_file_with_a_wrong_seal_is_refused(path: Path, place: int) -> None:
    content = bytearray(packed(LITERAL))
    content[place] ^= 1
    path.write_bytes(content)
    with refused(f"'{path}' is damaged (", "copy or download it again"):
        read_idx(path)


@both
@pytest.mark.parametrize("magic", ["01000802", "00010802", "00000702", "00000a02", "89504e47"])
def test_a_wrong_magic_is_refused(path: Path, store: Store, magic: str) -> None:
    path.write_bytes(store(bytes.fromhex(magic) + LITERAL[4:]))
    shown = bytes.fromhex(magic).hex(" ")
    with refused(f"'{path}' starts with the bytes {shown}; an IDX file", "starts with 00 00 08"):
        read_idx(path)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (0x09, "signed bytes"),
        (0x0B, "16-bit integers"),
        (0x0C, "32-bit integers"),
        (0x0D, "32-bit floats"),
        (0x0E, "64-bit floats"),
    ],
)
def test_other_types_than_unsigned_bytes_are_refused_by_name(path: Path, kind: int, name: str) -> None:
    path.write_bytes(bytes([0, 0, kind, 1, 0, 0, 0, 1]) + b"\1" * 8)
    with refused(f"'{path}' holds {name} (type 0x{kind:02x}); an IDX file of unsigned bytes", "convert it"):
        read_idx(path)


def test_a_packed_file_in_a_packed_file_is_refused(path: Path) -> None:
    path.write_bytes(packed(packed(LITERAL)))
    with refused(f"'{path}' starts with the bytes 1f 8b"):
        read_idx(path)


@pytest.mark.parametrize("sizes", [(0,), (0, 28, 28), (5, 0)])
def test_a_file_without_items_is_refused(path: Path, sizes: tuple[int, ...]) -> None:
    path.write_bytes(bytes([0, 0, 8, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes))
    shown = " × ".join(map(str, sizes))
    with refused(f"'{path}' promises {shown} values in its header; at least one is needed"):
        read_idx(path)


def test_a_rank_that_torch_cannot_work_with_is_refused(path: Path) -> None:
    path.write_bytes(bytes([0, 0, 8, 65]) + b"\0\0\0\1" * 65 + b"\7")
    with refused(f"'{path}' states a rank of 65; at most 64 is allowed"):
        read_idx(path)
    path.write_bytes(bytes([0, 0, 8, 64]) + b"\0\0\0\1" * 64 + b"\7")
    assert read_idx(path).sum() == 7


def peak_of_refusal(path: Path, sentence: str) -> int:
    """Most bytes that Python held at once while the file was refused."""
    tracemalloc.start()
    try:
        with refused(sentence):
            read_idx(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@both
@pytest.mark.parametrize("rank", [1, 3, 64])
def test_absurd_sizes_are_refused_before_memory_is_taken(path: Path, store: Store, rank: int) -> None:
    path.write_bytes(store(bytes([0, 0, 8, rank]) + b"\xff\xff\xff\xff" * rank + b"\0" * 100))
    assert peak_of_refusal(path, "promises 4294967295") < 1 << 20


def test_a_packed_promise_that_could_be_kept_is_read_in_chunks(path: Path) -> None:
    """100 KB of zeros in about 130 bytes could unpack to no more than 1032 times that: 134 KB."""
    path.write_bytes(packed(bytes([0, 0, 8, 1]) + struct.pack(">I", 120_000) + b"\0" * 100_000))
    assert peak_of_refusal(path, "holds 100000 of 120000 bytes") < 1 << 21


def test_a_bomb_is_refused_after_the_promised_bytes(path: Path) -> None:
    """64 MB of zeros behind a header that promises ten."""
    path.write_bytes(packed(bytes([0, 0, 8, 1]) + struct.pack(">I", 10) + b"\0" * (64 << 20)))
    assert peak_of_refusal(path, "holds more than these 10 bytes") < 1 << 21


def test_a_large_file_with_a_small_promise_is_refused_without_reading_it(path: Path) -> None:
    path.write_bytes(LITERAL)
    os.truncate(path, 1 << 30)  # sparse: 1 GB of size and a block of disk
    assert peak_of_refusal(path, "holds more than these 6 bytes") < 1 << 20


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_a_labelled_folder_comes_back_as_written(tmp_path: Path, packed: bool) -> None:
    arrays = mnist_like(train=5, test=3, height=2, width=3)
    write_mnist_like(tmp_path, arrays, packed=packed)
    train, test = read_labelled_idx(tmp_path)
    for part, count, prefix in ((train, 5, "train"), (test, 3, "t10k")):
        assert part.images.shape == (count, 1, 2, 3)
        assert (part.images.dtype, part.labels.dtype) == (torch.uint8, torch.int64)
        np.testing.assert_array_equal(part.images[:, 0].numpy(), arrays[f"{prefix}-images-idx3-ubyte"])
        assert part.labels.tolist() == arrays[f"{prefix}-labels-idx1-ubyte"].tolist()


def test_a_plain_file_goes_before_a_packed_one(tmp_path: Path) -> None:
    arrays = mnist_like()
    write_mnist_like(tmp_path, arrays)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(b"not looked at")
    assert read_labelled_idx(tmp_path)[0].labels.tolist() == arrays["train-labels-idx1-ubyte"].tolist()


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with refused(
        f"'{tmp_path / 'no'}' does not exist; a folder with the four files of MNIST is expected there"
    ):
        read_labelled_idx(tmp_path / "no")


def test_a_file_in_place_of_the_folder_is_refused(path: Path) -> None:
    path.touch()
    with refused(f"'{path}' is a file or lies below one; a folder with the four files of MNIST"):
        read_labelled_idx(path)


def test_a_folder_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", denied)
    with refused(f"'{tmp_path}' may not be read (permission denied)"):
        read_labelled_idx(tmp_path)


@pytest.mark.parametrize("name", IDX_NAMES)
def test_each_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write_mnist_like(tmp_path, mnist_like())
    (tmp_path / name).unlink()
    with refused(f"'{tmp_path}' holds neither {name} nor {name}.gz; one of them is needed: put it there"):
        read_labelled_idx(tmp_path)


@pytest.mark.parametrize("name", IDX_NAMES)
def test_each_file_that_is_a_folder_is_named(tmp_path: Path, name: str) -> None:
    write_mnist_like(tmp_path, mnist_like())
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with refused(f"'{tmp_path / name}' is a folder"):
        read_labelled_idx(tmp_path)


def folder_with(tmp_path: Path, name: str, values: Bytes) -> Path:
    write_mnist_like(tmp_path, mnist_like(train=5, test=3, height=2, width=3) | {name: values})
    return tmp_path


def test_one_label_too_few_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "train-labels-idx1-ubyte", random_bytes(4, below=10))
    with refused("train-images-idx3-ubyte' holds 5 images and ", "train-labels-idx1-ubyte' 4 labels"):
        read_labelled_idx(folder)


def test_one_image_too_few_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "t10k-images-idx3-ubyte", random_bytes(2, 2, 3))
    with refused("t10k-images-idx3-ubyte' holds 2 images and ", "t10k-labels-idx1-ubyte' 3 labels"):
        read_labelled_idx(folder)


def test_images_of_another_rank_are_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "train-images-idx3-ubyte", random_bytes(5, 6))
    with refused("train-images-idx3-ubyte' holds values of shape 5 × 6; a shape of count × height × width"):
        read_labelled_idx(folder)


def test_labels_of_another_rank_are_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "t10k-labels-idx1-ubyte", random_bytes(3, 1, below=10))
    with refused("t10k-labels-idx1-ubyte' holds values of shape 3 × 1; a shape of count is needed"):
        read_labelled_idx(folder)


def test_a_single_value_in_place_of_labels_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "train-labels-idx1-ubyte", np.array(3, np.uint8))
    with refused("train-labels-idx1-ubyte' holds values of shape one value; a shape of count is needed"):
        read_labelled_idx(folder)


def test_training_and_test_images_of_two_sizes_are_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "t10k-images-idx3-ubyte", random_bytes(3, 3, 2))
    with refused(f"'{folder}' holds training images of 2 × 3 pixels and test images of 3 × 2"):
        read_labelled_idx(folder)


def test_a_label_out_of_range_is_refused_with_its_place(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "t10k-labels-idx1-ubyte", np.array([0, 9, 10], np.uint8))
    with refused("t10k-labels-idx1-ubyte' gives item 2 the label 10; labels from 0 to 9 are allowed"):
        read_labelled_idx(folder)


def test_the_number_of_classes_can_be_stated(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "t10k-labels-idx1-ubyte", np.array([0, 9, 46], np.uint8))
    assert read_labelled_idx(folder, classes=47)[1].labels.tolist() == [0, 9, 46]
    with refused("gives item 2 the label 46; labels from 0 to 45 are allowed"):
        read_labelled_idx(folder, classes=46)
