"""A thousand damaged files for every reader: refused in one sentence, or read with every shape as it was.

A file that was cut is refused in all cases. A flipped bit may only pass where it is other data.
"""

import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from esper.tolaria.readers import (
    LabelledImages,
    Part,
    read_cifar_binary,
    read_idx,
    read_image_folder,
    read_labelled_idx,
    read_split_folders,
    read_text,
    windows,
)
from tests.tolaria.readers.building import (
    CIFAR_NAMES,
    IDX_NAMES,
    attempt,
    cuts,
    flips,
    idx_bytes,
    image_bytes,
    mnist_like,
    overwrite,
    random_bytes,
    write_cifar,
    write_files,
    write_mnist_like,
)

KINDS = ("PNG", "JPEG", "BMP", "WEBP")


class Outcome:
    """How many of the flipped files were read, so that a test cannot pass by refusing everything."""

    def __init__(self) -> None:
        self.read = 0
        self.refused = 0

    def count(self, passed: bool) -> None:
        self.read += passed
        self.refused += not passed


def damaged(folder: Path, count: int, rng_seed: int) -> Iterator[tuple[Path, bytes, bool]]:
    """``count`` times one file of the folder is damaged; gives its path, what it holds and if it was cut."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    wholes = [path.read_bytes() for path in files]
    share = count // len(files)
    for place, (path, whole) in enumerate(zip(files, wholes, strict=True)):
        rest = count - share * (len(files) - 1) if place == 0 else share
        cut = rest // 2
        for content in cuts(whole, cut, rng_seed + place):
            overwrite(path, content)
            yield path, content, True
        for content in flips(whole, rest - cut, rng_seed + 100 + place):
            overwrite(path, content)
            yield path, content, False
        overwrite(path, whole)


def test_a_thousand_are_a_thousand(tmp_path: Path) -> None:
    write_mnist_like(tmp_path, mnist_like())
    whole = {path: path.read_bytes() for path in tmp_path.iterdir()}
    seen = [(path, cut) for path, content, cut in damaged(tmp_path, 1000, 0) if content != whole[path]]
    assert len(seen) == 1000
    assert {path for path, _ in seen} == set(whole)
    assert sum(cut for _, cut in seen) == 500
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == whole


def test_idx_plain(tmp_path: Path) -> None:
    whole = idx_bytes(random_bytes(3, 4, 5))
    overwrite(tmp_path / "x", whole)
    outcome = Outcome()
    for path, content, cut in damaged(tmp_path, 1000, rng_seed=1):
        values = attempt(lambda path=path: read_idx(path))
        if values is None:
            outcome.count(False)
            continue
        assert not cut
        assert content[:16] == whole[:16]  # a flip in the header is never other data
        assert (values.shape, values.dtype) == ((3, 4, 5), torch.uint8)
        assert values.numpy().tobytes() == content[16:]
        outcome.count(True)
    assert outcome.read > 200  # 60 of 76 bytes are values
    assert outcome.refused > 550


def test_idx_packed(tmp_path: Path) -> None:
    written = random_bytes(3, 4, 5)
    overwrite(tmp_path / "x", gzip.compress(idx_bytes(written), mtime=0))
    outcome = Outcome()
    for path, _, cut in damaged(tmp_path, 1000, rng_seed=2):
        values = attempt(lambda path=path: read_idx(path))
        if values is None:
            outcome.count(False)
            continue
        # A checksum seals the content, so only a flip in gzip's notes on time and system goes unnoticed.
        assert not cut
        np.testing.assert_array_equal(values.numpy(), written)
        outcome.count(True)
    assert 0 < outcome.read < 100


def right(part: Part | LabelledImages, shape: tuple[int, ...], classes: int = 10) -> bool:
    return (
        part.images.shape == shape
        and part.images.dtype == torch.uint8
        and part.labels.shape == shape[:1]
        and part.labels.dtype == torch.int64
        and int(part.labels.min()) >= 0
        and int(part.labels.max()) < classes
    )


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_labelled_idx(tmp_path: Path, packed: bool) -> None:
    write_mnist_like(tmp_path, mnist_like(train=6, test=4, height=3, width=4), packed=packed)
    assert len(list(tmp_path.iterdir())) == len(IDX_NAMES)
    outcome = Outcome()
    for _, _, cut in damaged(tmp_path, 1000, rng_seed=3):
        parts = attempt(lambda: read_labelled_idx(tmp_path))
        if parts is not None:
            assert not cut
            assert right(parts[0], (6, 1, 3, 4))
            assert right(parts[1], (4, 1, 3, 4))
        outcome.count(parts is not None)
    assert outcome.read > 20
    assert outcome.refused > 500


def test_cifar_binary(tmp_path: Path) -> None:
    write_cifar(tmp_path, records=2)
    assert len(list(tmp_path.iterdir())) == len(CIFAR_NAMES)
    outcome = Outcome()
    for _, _, cut in damaged(tmp_path, 1000, rng_seed=4):
        parts = attempt(lambda: read_cifar_binary(tmp_path, records=2))
        if parts is not None:
            assert not cut
            assert right(parts[0], (10, 3, 32, 32))
            assert right(parts[1], (2, 3, 32, 32))
        outcome.count(parts is not None)
    assert outcome.read > 450  # nearly every byte is a pixel
    assert outcome.refused >= 500


def test_cifar_binary_with_damaged_labels(tmp_path: Path) -> None:
    """Flips among 6,146 bytes rarely meet a label: all 256 values of one."""
    write_cifar(tmp_path, records=2)
    whole = (tmp_path / "data_batch_2.bin").read_bytes()
    for label in range(256):
        overwrite(tmp_path / "data_batch_2.bin", whole[:3073] + bytes([label]) + whole[3074:])
        parts = attempt(lambda: read_cifar_binary(tmp_path, records=2))
        assert (parts is not None) == (label < 10)
        assert parts is None or parts[0].labels[3] == label


def image_files(kind: str) -> dict[str, bytes]:
    """Two classes of two small images, one of them grey where the format knows grey."""
    return {
        "a/1": image_bytes(random_bytes(6, 5, 3, rng_seed=1), kind),
        "a/2": image_bytes(random_bytes(6, 5, rng_seed=2), kind),
        "b/1": image_bytes(random_bytes(6, 5, 3, rng_seed=3), kind),
        "b/2": image_bytes(random_bytes(6, 5, 3, rng_seed=4), kind),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_image_folder(tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    write_files(tmp_path, image_files(kind))
    outcome = Outcome()
    for _, _, cut in damaged(tmp_path, 1000, rng_seed=5):
        read = attempt(lambda: read_image_folder(tmp_path))
        if read is not None:
            assert not cut
            assert right(read, (4, 3, 6, 5), classes=2)
            assert read.labels.tolist() == [0, 0, 1, 1]
        outcome.count(read is not None)
    assert outcome.refused >= 500
    assert (outcome.read == 0) == (kind == "PNG")  # the one with checksums
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", KINDS)
def test_image_folder_with_a_size(tmp_path: Path, kind: str) -> None:
    """Here a flip in a stated size can pass the comparison of sizes."""
    write_files(tmp_path, image_files(kind))
    for _, _, cut in damaged(tmp_path, 250, rng_seed=6):
        read = attempt(lambda: read_image_folder(tmp_path, size=(4, 3), grey=True))
        if read is not None:
            assert not cut
            assert right(read, (4, 1, 4, 3), classes=2)


def test_split_folders(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_files(tmp_path / split, image_files("JPEG"))
    outcome = Outcome()
    for _, _, cut in damaged(tmp_path, 1000, rng_seed=7):
        parts = attempt(lambda: read_split_folders(tmp_path))
        if parts is not None:
            assert not cut
            assert all(right(part, (4, 3, 6, 5), classes=2) for part in parts)
        outcome.count(parts is not None)
    assert outcome.read > 50
    assert outcome.refused >= 500


TEXT = "Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich — für €5 😀\r\n" * 4


def tokens_of(text: str) -> Tensor:
    return torch.tensor([ord(character) for character in text])


def test_text_with_flipped_bits(tmp_path: Path) -> None:
    overwrite(tmp_path / "x", TEXT.encode())
    outcome = Outcome()
    for path, content, cut in damaged(tmp_path, 2000, rng_seed=8):
        if cut:
            continue
        text = attempt(lambda path=path: read_text(path))
        outcome.count(text is not None)
        if text is None:
            continue
        assert text.encode() == content
        inputs, targets = windows(tokens_of(text), 16)
        assert inputs.shape == targets.shape == ((len(text) - 1) // 16, 16)
    assert outcome.read + outcome.refused == 1000
    assert min(outcome.read, outcome.refused) > 300


def test_text_that_was_cut(tmp_path: Path) -> None:
    """Only a cut inside a character can be noticed, and every one is; another cut leaves a shorter text."""
    whole = TEXT.encode()
    ends = {len(TEXT[:count].encode()) for count in range(1, len(TEXT) + 1)}
    overwrite(tmp_path / "x", whole)
    inside = 0
    for content in cuts(whole, 1000, rng_seed=9):
        overwrite(tmp_path / "x", content)
        text = attempt(lambda: read_text(tmp_path / "x"))
        assert (text is not None) == (len(content) in ends)
        assert text is None or TEXT.startswith(text)
        inside += text is None
    assert inside > 50


def test_a_text_cut_below_one_window_is_refused(tmp_path: Path) -> None:
    for length in range(17):
        overwrite(tmp_path / "x", b"x" * length)
        assert attempt(lambda: windows(tokens_of(read_text(tmp_path / "x")), 16)) is None


def test_noise_is_refused_by_every_reader(tmp_path: Path) -> None:
    rng = np.random.default_rng(10)
    (tmp_path / "a").mkdir()
    for _ in range(100):
        noise = rng.bytes(int(rng.integers(0, 200)))
        overwrite(tmp_path / "a" / "x", noise)
        assert attempt(lambda: read_idx(tmp_path / "a" / "x")) is None
        for signature in (b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"BM", b"RIFF0000WEBP"):
            overwrite(tmp_path / "a" / "x", signature + noise)
            assert attempt(lambda: read_image_folder(tmp_path)) is None


@pytest.mark.parametrize("kind", ["JPEG", "BMP", "WEBP"])
def test_noise_that_ends_like_a_whole_image_is_refused(tmp_path: Path, kind: str) -> None:
    """Past the check of the file's end, the decoders themselves meet the noise."""
    rng = np.random.default_rng(11)
    (tmp_path / "a").mkdir()
    for _ in range(300):
        noise = rng.bytes(int(rng.integers(20, 200)))
        size = len(noise).to_bytes(4, "little")
        content = {
            "JPEG": b"\xff\xd8\xff" + noise + b"\xff\xd9",
            "BMP": b"BM" + (len(noise) + 6).to_bytes(4, "little") + noise,
            "WEBP": b"RIFF" + (len(noise) + 4).to_bytes(4, "little") + b"WEBPVP8 " + noise[8:] + size,
        }[kind]
        overwrite(tmp_path / "a" / "x", content)
        assert attempt(lambda: read_image_folder(tmp_path)) is None
