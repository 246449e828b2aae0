"""Reader of CIFAR-10 in binary batches."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.tolaria.readers.binary import read_cifar_binary
from tests.tolaria.readers.building import CIFAR_NAMES, refused, write_cifar


def test_cifar_records_are_read_as_written_in_the_order_of_the_batches(tmp_path: Path) -> None:
    written = write_cifar(tmp_path, records=3)
    train, test = read_cifar_binary(tmp_path, records=3)
    for part, names in ((train, CIFAR_NAMES[:5]), (test, CIFAR_NAMES[5:])):
        assert (part.images.dtype, part.labels.dtype) == (torch.uint8, torch.int64)
        np.testing.assert_array_equal(part.images, np.concatenate([written[name][1] for name in names]))
        np.testing.assert_array_equal(part.labels, np.concatenate([written[name][0] for name in names]))
    assert train.images.shape == (15, 3, 32, 32)
    assert test.images.shape == (3, 3, 32, 32)


def test_default_number_of_records_per_cifar_file_is_ten_thousand(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1.bin").touch()
    # This sparse file is read as records with label 0 and black pixels.
    os.truncate(tmp_path / "data_batch_1.bin", 9_999 * 3073)
    with refused(f"'{tmp_path / 'data_batch_1.bin'}' holds 30726927 bytes", "10000 × 3073 = 30730000"):
        read_cifar_binary(tmp_path)
    os.truncate(tmp_path / "data_batch_1.bin", 10_000 * 3073)
    # The first CIFAR file now has the right size, so the error names the second file, which is missing.
    with refused(f"'{tmp_path / 'data_batch_2.bin'}' does not exist"):
        read_cifar_binary(tmp_path)


@pytest.mark.parametrize("name", [CIFAR_NAMES[0], CIFAR_NAMES[-1]])
def test_cifar_files_that_are_missing_of_wrong_length_or_with_a_wrong_label_are_refused_by_path(
    tmp_path: Path, name: str
) -> None:
    write_cifar(tmp_path, records=2)
    path = tmp_path / name
    whole = path.read_bytes()
    for length in (0, 3073, 6145, 6147):
        os.truncate(path, length)
        with refused(f"'{path}' holds {length} bytes", "2 × 3073 = 6146: copy or download it again"):
            read_cifar_binary(tmp_path, records=2)
    path.write_bytes(whole[:3073] + b"\x0a" + whole[3074:])
    with refused(f"'{path}' gives item 1 the label 10; labels from 0 to 9 are allowed"):
        read_cifar_binary(tmp_path, records=2)
    path.unlink()
    with refused(f"'{path}' does not exist; a binary batch of CIFAR-10 is expected there"):
        read_cifar_binary(tmp_path, records=2)
