"""Readers of binary image data sets: IDX files (MNIST) and CIFAR-10.

An IDX file has a header with the shape, then one unsigned byte per value. Binary CIFAR-10 has six files of
records, each a label byte and 3 × 32 × 32 image bytes.
"""

import math
import struct
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from esper.leyline.errors import DataError
from esper.tolaria.readers import files
from esper.tolaria.readers.files import AGAIN, LabelledImages, file_size, list_folder, read_content, times

WANTED: Final = "an IDX file of unsigned bytes, plain or gzip-compressed,"
MAX_RANK: Final = 64  # Torch operations support at most 64 dimensions.
MAX_HEADER: Final = 4 + 4 * MAX_RANK
CIFAR_TRAIN: Final = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
CIFAR_TEST: Final = ("test_batch.bin",)
CIFAR_WANTED: Final = "a binary batch of CIFAR-10"
CIFAR_CLASSES: Final = 10
CIFAR_SHAPE: Final = (3, 32, 32)
CIFAR_RECORD: Final = 1 + 3 * 32 * 32


def read_idx(path: Path) -> Tensor:
    """Return the uint8 tensor of an IDX file, with the shape in its header."""
    shape = _shape(path, read_content(path, WANTED, limit=MAX_HEADER))
    start, count = 4 + 4 * len(shape), math.prod(shape)
    promise = f"'{path}' promises {times(shape)} values in its header"
    if count == 0:
        raise DataError(f"{promise}; at least one is needed: {AGAIN}")
    # The size in the header is checked before memory is allocated, because a damaged header can state any
    # size.
    if start + count > file_size(path, WANTED) * files.GREATEST_RATIO:
        raise DataError(f"{promise} and cannot hold them in its {file_size(path, WANTED)} bytes; {AGAIN}")
    content = read_content(path, WANTED, limit=start + count + 1)
    if len(content) < start + count:
        raise DataError(f"{promise} and holds {len(content) - start} of {count} bytes; {AGAIN}")
    if len(content) > start + count:
        raise DataError(f"{promise} and holds more than these {count} bytes; {AGAIN}")
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).reshape(shape)


def read_labelled_idx(folder: Path, *, classes: int = 10) -> tuple[LabelledImages, LabelledImages]:
    """Return training and test images from the four files of MNIST; plain files are preferred to ``.gz``."""
    names = {path.name for path in list_folder(folder, "a folder with the four files of MNIST")}
    train, test = (_read_part(folder, names, prefix, classes) for prefix in ("train", "t10k"))
    if train.images.shape[1:] != test.images.shape[1:]:
        raise DataError(
            f"'{folder}' holds training images of {times(train.images.shape[2:])} pixels and test images of"
            f" {times(test.images.shape[2:])}; they must have one size: {AGAIN}"
        )
    return train, test


def _read_part(folder: Path, names: set[str], prefix: str, classes: int) -> LabelledImages:
    images_path = _either(folder, names, f"{prefix}-images-idx3-ubyte")
    labels_path = _either(folder, names, f"{prefix}-labels-idx1-ubyte")
    images = _read_ranked(images_path, 3, "count × height × width")
    labels = _read_ranked(labels_path, 1, "count").long()
    if len(images) != len(labels):
        raise DataError(
            f"'{images_path}' holds {len(images)} images and '{labels_path}' {len(labels)} labels;"
            " there must be one label for each image: copy or download both again"
        )
    files.check_labels(labels, classes, labels_path)
    return LabelledImages(images.unsqueeze(1), labels)


def _either(folder: Path, names: set[str], name: str) -> Path:
    for candidate in (name, name + ".gz"):
        if candidate in names:
            return folder / candidate
    raise DataError(f"'{folder}' holds neither {name} nor {name}.gz; one of them is needed: put it there")


def _read_ranked(path: Path, rank: int, meaning: str) -> Tensor:
    values = read_idx(path)
    if values.ndim != rank:
        raise DataError(
            f"'{path}' holds values of shape {times(values.shape) or 'one value'}; a shape of {meaning} is"
            f" needed there: {AGAIN}"
        )
    return values


def _shape(path: Path, header: bytearray) -> tuple[int, ...]:
    """Return the shape in an IDX header, which has two zero bytes, value type, rank and big-endian sizes."""
    if len(header) < 4:
        raise DataError(
            f"'{path}' holds {len(header)} bytes, too few for a header; {WANTED} needs 4: {AGAIN}"
        )
    rank = header[3]
    if header[:3] != b"\0\0\x08":
        raise DataError(
            f"'{path}' starts with the bytes {header[:4].hex(' ')}; {WANTED} starts with 00 00 08:"
            f" convert it, or {AGAIN}"
        )
    if rank > MAX_RANK:
        raise DataError(f"'{path}' states a rank of {rank}; at most {MAX_RANK} is allowed: {AGAIN}")
    if len(header) < 4 + 4 * rank:
        raise DataError(f"'{path}' ends in its header, after {len(header)} of {4 + 4 * rank} bytes; {AGAIN}")
    return struct.unpack_from(f">{rank}I", header, 4)


def read_cifar_binary(folder: Path, *, records: int = 10_000) -> tuple[LabelledImages, LabelledImages]:
    """Return training and test images of CIFAR-10; every file must have exactly ``records`` records.

    CIFAR-10 files have no header, so a file that was cut between two records is only detected by the number
    of records.
    """
    return _read_batches(folder, CIFAR_TRAIN, records), _read_batches(folder, CIFAR_TEST, records)


def _read_batches(folder: Path, names: tuple[str, ...], records: int) -> LabelledImages:
    table = torch.cat([_read_batch(folder / name, records) for name in names])
    return LabelledImages(table[:, 1:].reshape(-1, *CIFAR_SHAPE), table[:, 0].long())


def _read_batch(path: Path, records: int) -> Tensor:
    """Return the records of a CIFAR-10 file as uint8 ``[records, 3073]``, the label first."""
    size = records * CIFAR_RECORD
    content = files.read_bytes(path, CIFAR_WANTED, limit=size + 1)
    if len(content) != size:
        raise DataError(
            f"'{path}' holds {file_size(path, CIFAR_WANTED)} bytes; {CIFAR_WANTED} has {records} ×"
            f" {CIFAR_RECORD} = {size}: {AGAIN}"
        )
    table = torch.frombuffer(content, dtype=torch.uint8).reshape(records, CIFAR_RECORD)
    files.check_labels(table[:, 0], CIFAR_CLASSES, path)
    return table
