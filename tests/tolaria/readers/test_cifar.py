import os
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.tolaria.readers import read_cifar_binary
from tests.tolaria.readers.building import CIFAR_NAMES, refused, write_cifar


def test_records_come_back_as_written_and_in_the_order_of_the_batches(tmp_path: Path) -> None:
    written = write_cifar(tmp_path, records=3)
    train, test = read_cifar_binary(tmp_path, records=3)
    for part, names in ((train, CIFAR_NAMES[:5]), (test, CIFAR_NAMES[5:])):
        assert (part.images.dtype, part.labels.dtype) == (torch.uint8, torch.int64)
        np.testing.assert_array_equal(part.images, np.concatenate([written[name][1] for name in names]))
        np.testing.assert_array_equal(part.labels, np.concatenate([written[name][0] for name in names]))
    assert train.images.shape == (15, 3, 32, 32)
    assert test.images.shape == (3, 3, 32, 32)


def test_a_record_worked_by_hand_is_read(tmp_path: Path) -> None:
    """Label 7, then red with its top right pixel 1, green with its bottom left pixel 2, blue all 3."""
    write_cifar(tmp_path, records=1)
    red, green = bytearray(1024), bytearray(1024)
    red[31], green[31 * 32] = 1, 2
    (tmp_path / "test_batch.bin").write_bytes(b"\7" + red + green + b"\3" * 1024)
    test = read_cifar_binary(tmp_path, records=1)[1]
    assert test.labels.tolist() == [7]
    assert (test.images[0, 0, 0, 31], test.images[0, 1, 31, 0]) == (1, 2)
    assert test.images[0].sum(dim=(1, 2)).tolist() == [1, 2, 3 * 1024]


def test_ten_thousand_records_per_file_are_the_rule(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1.bin").touch()
    os.truncate(tmp_path / "data_batch_1.bin", 9_999 * 3073)  # sparse: label 0 and black pixels
    with refused(f"'{tmp_path / 'data_batch_1.bin'}' holds 30726927 bytes", "10000 × 3073 = 30730000"):
        read_cifar_binary(tmp_path)
    os.truncate(tmp_path / "data_batch_1.bin", 10_000 * 3073)
    with refused(f"'{tmp_path / 'data_batch_2.bin'}' does not exist"):  # the first one was right
        read_cifar_binary(tmp_path)


@pytest.mark.parametrize("name", [CIFAR_NAMES[0], CIFAR_NAMES[-1]])
@pytest.mark.parametrize("length", [0, 3073, 6145, 6147])
def test_a_file_of_another_length_is_refused(tmp_path: Path, name: str, length: int) -> None:
    write_cifar(tmp_path, records=2)
    os.truncate(tmp_path / name, length)
    with refused(f"'{tmp_path / name}' holds {length} bytes", "2 × 3073 = 6146: copy or download it again"):
        read_cifar_binary(tmp_path, records=2)


@pytest.mark.parametrize("name", CIFAR_NAMES)
def test_each_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write_cifar(tmp_path, records=1)
    (tmp_path / name).unlink()
    with refused(f"'{tmp_path / name}' does not exist; a binary batch of CIFAR-10 is expected there"):
        read_cifar_binary(tmp_path, records=1)


@pytest.mark.parametrize("name", CIFAR_NAMES[4:])
def test_a_label_above_nine_is_refused_with_its_place(tmp_path: Path, name: str) -> None:
    write_cifar(tmp_path, records=3)
    content = bytearray((tmp_path / name).read_bytes())
    content[2 * 3073] = 10
    (tmp_path / name).write_bytes(content)
    with refused(f"'{tmp_path / name}' gives item 2 the label 10; labels from 0 to 9 are allowed"):
        read_cifar_binary(tmp_path, records=3)


def test_no_records_cannot_be_asked_for(tmp_path: Path) -> None:
    with refused(f"0 records per file were asked for below '{tmp_path}'; ask for at least 1"):
        read_cifar_binary(tmp_path, records=0)
