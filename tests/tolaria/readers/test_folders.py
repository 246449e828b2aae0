import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.tolaria.readers import read_image_folder, read_split_folders
from tests.tolaria.readers.building import (
    Bytes,
    denied,
    image_bytes,
    png_bytes,
    random_bytes,
    refused,
    write_files,
)


def even(value: int, height: int = 2, width: int = 3) -> bytes:
    """A grey PNG of one value."""
    return png_bytes(np.full((height, width), value, np.uint8))


def colours(rng_seed: int) -> Bytes:
    return random_bytes(4, 5, 3, rng_seed=rng_seed)


def test_images_come_class_by_class_in_the_order_of_names(tmp_path: Path) -> None:
    # Written in another order; names sort by character, so 10 goes before 2.
    write_files(
        tmp_path,
        {"dog/2": even(4), "cat/b": even(2), "dog/10": even(3), "ant/z": even(0), "cat/a": even(1)},
    )
    read = read_image_folder(tmp_path, grey=True)
    assert read.classes == ("ant", "cat", "dog")
    assert read.labels.tolist() == [0, 1, 1, 2, 2]
    assert read.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert (read.images.dtype, read.labels.dtype) == (torch.uint8, torch.int64)
    assert read.images.shape == (5, 1, 2, 3)


def test_colours_come_back_as_written(tmp_path: Path) -> None:
    written = [colours(place) for place in range(4)]
    names = ("a/1.png", "a/2.bmp", "b/1.webp", "b/2.png")
    kinds = ("PNG", "BMP", "WEBP", "PNG")
    for name, kind, pixels in zip(names, kinds, written, strict=True):
        write_files(tmp_path, {name: image_bytes(pixels, kind, lossless=True)})
    read = read_image_folder(tmp_path)
    assert read.images.shape == (4, 3, 4, 5)
    np.testing.assert_array_equal(read.images, np.stack(written).transpose(0, 3, 1, 2))


def test_what_was_read_is_writable(tmp_path: Path) -> None:
    write_files(tmp_path, {"a/1": even(7)})
    images = read_image_folder(tmp_path).images
    images += 1
    assert images.unique().tolist() == [8]


def test_images_of_two_sizes_are_refused(tmp_path: Path) -> None:
    write_files(tmp_path, {"a/1": even(0, 2, 3), "a/2": even(0, 2, 3), "b/1": even(0, 3, 2)})
    with refused(
        f"'{tmp_path / 'b' / '1'}' has 3 × 2 pixels and the first image 2 × 3; one size is allowed: "
    ):
        read_image_folder(tmp_path)


def test_a_size_brings_them_together(tmp_path: Path) -> None:
    write_files(tmp_path, {"a/1": even(5, 2, 3), "b/1": even(6, 3, 2)})
    read = read_image_folder(tmp_path, size=(4, 7))
    assert read.images.shape == (2, 3, 4, 7)
    assert read.images.flatten(1).float().mean(1).tolist() == [5, 6]


@pytest.mark.parametrize("size", [(0, 4), (4, 0), (-1, 4)])
def test_a_size_of_nothing_is_refused(tmp_path: Path, size: tuple[int, int]) -> None:
    write_files(tmp_path, {"a/1": even(5)})
    with refused(
        f"images of '{tmp_path}' cannot be made {size[0]} × {size[1]} pixels; ask for 1 × 1 or more"
    ):
        read_image_folder(tmp_path, size=size)


def test_hidden_entries_are_no_data(tmp_path: Path) -> None:
    write_files(tmp_path, {"a/1": even(5), "a/.DS_Store": b"x", ".cache/x": b"x", ".hidden": b"x"})
    read = read_image_folder(tmp_path)
    assert (len(read.images), read.classes) == (1, ("a",))


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with refused(
        f"'{tmp_path / 'no'}' does not exist; a folder with one folder of images per class is expected"
    ):
        read_image_folder(tmp_path / "no")


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, {"x": even(0)})
    with refused(
        f"'{tmp_path / 'x'}' is a file or lies below one; a folder with one folder of images per class"
    ):
        read_image_folder(tmp_path / "x")


def test_a_folder_without_class_folders_is_refused(tmp_path: Path) -> None:
    with refused(f"'{tmp_path}' has no class folders; put one folder of images per class there"):
        read_image_folder(tmp_path)


def test_a_class_folder_without_images_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, {"a/1": even(0), "b/.hidden": b""})
    with refused(f"the class folder '{tmp_path / 'b'}' holds no images; put some there or take it away"):
        read_image_folder(tmp_path)


def test_a_file_beside_the_class_folders_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, {"a/1": even(0), "b.png": even(0)})
    with refused(
        f"'{tmp_path / 'b.png'}' is a file or lies below one; a folder with the images of one class"
    ):
        read_image_folder(tmp_path)


def test_a_folder_in_a_class_folder_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, {"a/1": even(0), "a/more/2": even(0)})
    with refused(f"'{tmp_path / 'a' / 'more'}' is a folder; an image file is expected there"):
        read_image_folder(tmp_path)


def test_a_file_that_is_no_image_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, {"a/1": even(0), "a/Thumbs.db": b"\xd0\xcf\x11\xe0"})
    with refused(f"'{tmp_path / 'a' / 'Thumbs.db'}' is none of PNG, JPEG, BMP, WEBP"):
        read_image_folder(tmp_path)


def test_permission_denied_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, {"a/1": even(0)})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", denied)
        with refused(f"'{tmp_path / 'a' / '1'}' may not be read (permission denied)"):
            read_image_folder(tmp_path)
    monkeypatch.setattr(os, "listdir", denied)
    with refused(f"'{tmp_path}' may not be read (permission denied)"):
        read_image_folder(tmp_path)


def test_train_and_test_folders_give_the_two_parts(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {
            "train/cat/1": even(1),
            "train/cat/2": even(2),
            "train/dog/1": even(3),
            "test/cat/1": even(4),
            "test/dog/1": even(5),
            "README": b"not looked at",
        },
    )
    train, test = read_split_folders(tmp_path, grey=True)
    assert train.images[:, 0, 0, 0].tolist() == [1, 2, 3]
    assert train.labels.tolist() == [0, 0, 1]
    assert test.images[:, 0, 0, 0].tolist() == [4, 5]
    assert test.labels.tolist() == [0, 1]
    resized, _ = read_split_folders(tmp_path, size=(6, 4))
    assert resized.images.shape == (3, 3, 6, 4)


@pytest.mark.parametrize(("missing", "there"), [("train", "test"), ("test", "train")])
def test_a_missing_split_is_refused(tmp_path: Path, missing: str, there: str) -> None:
    write_files(tmp_path, {f"{there}/a/1": even(0)})
    with refused(f"'{tmp_path / missing}' does not exist; a folder with one folder of images per class"):
        read_split_folders(tmp_path)


@pytest.mark.parametrize("split", ["train", "test"])
def test_other_classes_in_one_split_are_refused(tmp_path: Path, split: str) -> None:
    write_files(tmp_path, {f"{part}/{name}/1": even(0) for part in ("train", "test") for name in "ab"})
    write_files(tmp_path, {f"{split}/{name}/1": even(0) for name in "cd"})
    with refused(
        f"'{tmp_path}' has c, d in only one of train and test; both must have the same class folders"
    ):
        read_split_folders(tmp_path)


def test_splits_of_two_sizes_are_refused(tmp_path: Path) -> None:
    write_files(tmp_path, {"train/a/1": even(0, 2, 3), "test/a/1": even(0, 3, 2)})
    with refused(
        f"'{tmp_path}' has images of 2 × 3 pixels in train and of 3 × 2 in test; one size is allowed"
    ):
        read_split_folders(tmp_path)


def test_the_shared_archive_of_jpegs_is_read(tmp_path: Path) -> None:
    """Two classes of it with three images per split; $ESPER_SHARED_DATA says where the archive lies."""
    archive = Path(os.environ.get("ESPER_SHARED_DATA", "")) / "cifar10_jpg.tar.xz"
    if not archive.is_file():
        pytest.skip("$ESPER_SHARED_DATA names no folder with cifar10_jpg.tar.xz")
    wanted = {
        f"{split}/{name}/000{number}.jpg"
        for split in ("train", "test")
        for name in ("airplane", "truck")
        for number in range(3)
    }
    with tarfile.open(archive, "r|xz") as members:
        for member in members:
            file = members.extractfile(member) if member.name in wanted else None
            if file is not None:
                write_files(tmp_path, {member.name: file.read()})
    train, test = read_split_folders(tmp_path)
    for part in (train, test):
        assert part.images.shape == (6, 3, 32, 32)
        assert part.labels.tolist() == [0, 0, 0, 1, 1, 1]
        assert part.images.float().std() > 10
    assert not torch.equal(train.images, test.images)
