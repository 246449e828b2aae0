"""CIFAR-10 in its binary version: six files of records, each one byte of label and 3 × 32 × 32 of image."""

from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from esper.leyline.errors import DataError
from esper.tolaria.readers.files import AGAIN, file_size, read_bytes
from esper.tolaria.readers.labels import LabelledImages, check_labels

TRAIN: Final = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST: Final = ("test_batch.bin",)
WANTED: Final = "a binary batch of CIFAR-10"
CLASSES: Final = 10
SHAPE: Final = (3, 32, 32)
RECORD: Final = 1 + 3 * 32 * 32


def read_cifar_binary(folder: Path, *, records: int = 10_000) -> tuple[LabelledImages, LabelledImages]:
    """Training and test part; every file must hold exactly ``records`` records.

    A file has no header: the number is what tells one that was cut between two records.
    """
    return _read_part(folder, TRAIN, records), _read_part(folder, TEST, records)


def _read_part(folder: Path, names: tuple[str, ...], records: int) -> LabelledImages:
    table = torch.cat([_read_batch(folder / name, records) for name in names])
    return LabelledImages(table[:, 1:].reshape(-1, *SHAPE), table[:, 0].long())


def _read_batch(path: Path, records: int) -> Tensor:
    """uint8 ``[records, 3073]``, label first."""
    size = records * RECORD
    content = read_bytes(path, WANTED, limit=size + 1)
    if len(content) != size:
        raise DataError(
            f"'{path}' holds {file_size(path, WANTED)} bytes; {WANTED} has {records} × {RECORD} = {size}:"
            f" {AGAIN}"
        )
    table = torch.frombuffer(content, dtype=torch.uint8).reshape(records, RECORD)
    check_labels(table[:, 0], CLASSES, path)
    return table
