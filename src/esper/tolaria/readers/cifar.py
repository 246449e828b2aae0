"""Reader of binary CIFAR-10: six files of records, each a label byte and 3 × 32 × 32 image bytes."""

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
    """Return training and test images of CIFAR-10; every file must have exactly ``records`` records.

    CIFAR-10 files have no header, so a file that was cut between two records is only detected by the number
    of records.
    """
    return _read_part(folder, TRAIN, records), _read_part(folder, TEST, records)


def _read_part(folder: Path, names: tuple[str, ...], records: int) -> LabelledImages:
    table = torch.cat([_read_batch(folder / name, records) for name in names])
    return LabelledImages(table[:, 1:].reshape(-1, *SHAPE), table[:, 0].long())


def _read_batch(path: Path, records: int) -> Tensor:
    """Return the records of a CIFAR-10 file as uint8 ``[records, 3073]``, the label first."""
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
