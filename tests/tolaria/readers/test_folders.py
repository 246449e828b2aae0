"""Reader of images in one folder per class."""

from pathlib import Path

import numpy as np
import pytest
import torch

from esper.tolaria.readers.image_files import read_image_folder, read_split_folders
from tests.tolaria.readers.building import png_bytes, refused, write_files


def even(value: int, height: int = 2, width: int = 3) -> bytes:
    """Return a grey PNG file in which all pixels have one value."""
    return png_bytes(np.full((height, width), value, np.uint8))


def test_images_in_class_folders_are_sorted_by_class_and_file_name(tmp_path: Path) -> None:
    # Files are written in another order than that of their names; sorted by character, name 10 precedes 2.
    write_files(
        tmp_path, {"dog/2": even(4), "cat/b": even(2), "dog/10": even(3), "ant/z": even(0), "cat/a": even(1)}
    )
    read, classes = read_image_folder(tmp_path)
    assert classes == ("ant", "cat", "dog")
    assert read.labels.tolist() == [0, 1, 1, 2, 2]
    assert read.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert (read.images.dtype, read.labels.dtype) == (torch.uint8, torch.int64)
    assert read.images.shape == (5, 3, 2, 3)


def test_hidden_files_and_folders_among_class_folders_are_ignored(tmp_path: Path) -> None:
    write_files(tmp_path, {"a/1": even(5), "b/1": even(6)})
    write_files(tmp_path, {"a/.DS_Store": b"x", ".cache/x": b"x", ".hidden": b"x"})
    assert read_image_folder(tmp_path)[0].images.flatten(1).float().mean(1).tolist() == [5, 6]


def test_folders_train_and_test_give_the_training_and_the_test_split(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {"train/cat/1": even(1), "train/cat/2": even(2), "train/dog/1": even(3)}
        | {"test/cat/1": even(4), "test/dog/1": even(5), "README": b"ignored"},
    )
    train, test = read_split_folders(tmp_path)
    assert train.images[:, 0, 0, 0].tolist() == [1, 2, 3]
    assert train.labels.tolist() == [0, 0, 1]
    assert test.images[:, 0, 0, 0].tolist() == [4, 5]
    assert test.labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "'{0}' has no class folders; put one folder of images per class there"),
        ({"a/1": even(0), "b/.hidden": b""}, "the class folder '{0}/b' holds no images; put some there"),
        ({"a/1": even(0), "b.png": even(0)}, "'{0}/b.png' is a file or lies below one; a folder with the"),
        ({"a/1": even(0), "a/more/2": even(0)}, "'{0}/a/more' is a folder; an image file is expected there"),
        ({"a/1": even(0), "a/Thumbs.db": b"\xd0\xcf"}, "'{0}/a/Thumbs.db' is none of PNG, JPEG, BMP, WEBP"),
        ({"a/1": even(0), "b/1": even(0, 3, 2)}, "'{0}/b/1' has 3 × 2 pixels and the first image 2 × 3"),
        ({"test/a/1": even(0)}, "'{0}/train' does not exist; a folder with one folder of images per class"),
        ({"train/a/1": even(0)}, "'{0}/test' does not exist; a folder with one folder of images per class"),
        ({"train/a/1": even(0), "test/a/1": even(0), "test/c/1": even(0)}, "'{0}' has c in only one of"),
        ({"train/a/1": even(0), "train/c/1": even(0), "test/a/1": even(0)}, "'{0}' has c in only one of"),
        ({"train/a/1": even(0), "test/a/1": even(0, 3, 2)}, "images of 2 × 3 pixels in train and of 3 × 2"),
    ],
)  # fmt: skip
def test_invalid_class_folders_and_inconsistent_train_and_test_folders_are_refused(
    tmp_path: Path, files: dict[str, bytes], sentence: str
) -> None:
    write_files(tmp_path, files)
    with refused(sentence.format(tmp_path)):
        (read_split_folders if "train" in f"{sentence}{files}" else read_image_folder)(tmp_path)
