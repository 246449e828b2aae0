"""Damaged data files of every format are refused, or read as other data of the same shape."""

import gzip
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from esper.leyline.errors import DataError
from esper.tolaria.readers.binary import read_cifar_binary, read_idx, read_labelled_idx
from esper.tolaria.readers.image_files import read_image_folder
from tests.tolaria.readers.building import (
    KINDS,
    cuts,
    flips,
    idx_bytes,
    image_bytes,
    mnist_like,
    random_bytes,
    refused,
    write_cifar,
    write_files,
    write_mnist_like,
)

FLIPS = 60


def make_idx(folder: Path, pack: Callable[[bytes], bytes] = bytes) -> Path:
    write_files(folder, {"x": pack(idx_bytes(random_bytes(3, 4, 5)))})
    return folder / "x"


def make_labelled(folder: Path) -> Path:
    write_mnist_like(folder, mnist_like())
    return folder / "train-labels-idx1-ubyte"


def make_cifar(folder: Path) -> Path:
    write_cifar(folder, records=2)
    return folder / "data_batch_2.bin"


def make_images(kind: str, folder: Path) -> Path:
    images = {name: random_bytes(6, 5, 3, rng_seed=place) for place, name in enumerate("ab")}
    write_files(folder, {f"{name}/1": image_bytes(pixels, kind) for name, pixels in images.items()})
    return folder / "b" / "1"


def read_labels(path: Path) -> Tensor:
    return read_labelled_idx(path.parent)[0].labels


def read_cifar(path: Path) -> Tensor:
    return read_cifar_binary(path.parent, records=2)[0].images


def read_images(path: Path) -> Tensor:
    return read_image_folder(path.parent.parent)[0].images


READERS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Tensor], tuple[int, ...], range]] = {
    "idx": (make_idx, read_idx, (3, 4, 5), range(20, FLIPS)),
    "idx.gz": (partial(make_idx, pack=gzip.compress), read_idx, (3, 4, 5), range(FLIPS // 3)),
    "labelled idx": (make_labelled, read_labels, (5,), range(FLIPS)),
    "cifar": (make_cifar, read_cifar, (10, 3, 32, 32), range(50, FLIPS + 1)),
    **{
        kind: (
            partial(make_images, kind),
            read_images,
            (2, 3, 6, 5),
            range(kind != "PNG", FLIPS if kind != "PNG" else FLIPS // 10),
        )
        for kind in KINDS
    },
}
"""For each file format: function that writes a file, function that reads it, shape of the data, and the range
in which the number of files must be that are still readable after one bit of each was flipped.
"""


@pytest.mark.parametrize("name", READERS)
def test_damaged_data_file_is_refused_or_read_as_other_data_of_the_same_shape(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make, read, shape, readable = READERS[name]
    path = make(tmp_path)
    whole = path.read_bytes()
    assert read(path).shape == shape
    # Pillow and gzip accept files without the last byte, or with zeros after the end.
    for content in cuts(whole)[:3] if name in KINDS or "gz" in name else [*cuts(whole), whole + b"\0"]:
        path.write_bytes(content)
        with refused("'"):
            read(path)
    count = 0
    for content in flips(whole, FLIPS):
        path.write_bytes(content)
        try:
            values = read(path)
        except DataError:
            continue
        assert (values.shape, values.dtype) in ((shape, torch.uint8), (shape, torch.int64))
        count += 1
    assert count in readable
    assert capfd.readouterr() == ("", "")
