"""Reader of images in one folder per class; the sorted folder names are the classes."""

from pathlib import Path

import torch

from esper.leyline.errors import DataError
from esper.tolaria.readers.files import list_folder
from esper.tolaria.readers.image_files import Pixels, read_image
from esper.tolaria.readers.labels import LabelledImages


def read_image_folder(folder: Path, *, classes: int | None = None) -> tuple[LabelledImages, tuple[str, ...]]:
    """Return all images as RGB, sorted by class and file name, and the class names.

    Args:
        folder: Folder that has one folder of images per class.
        classes: Required number of classes; any number unless given.

    Raises:
        DataError: The number of classes is 0 or not ``classes``, a file is no image, or image sizes differ.
    """
    class_folders = list_folder(folder, "a folder with one folder of images per class")
    if not class_folders:
        raise DataError(f"'{folder}' has no class folders; put one folder of images per class there")
    if classes is not None and len(class_folders) != classes:
        names = ", ".join(path.name for path in class_folders)
        raise DataError(
            f"'{folder}' has {len(class_folders)} class folders ({names}); {classes} are needed: add what is"
            " missing, or take away what does not belong there"
        )
    planes = bytearray()
    labels: list[int] = []
    first: Pixels | None = None
    for label, class_folder in enumerate(class_folders):
        files = list_folder(class_folder, "a folder with the images of one class")
        if not files:
            raise DataError(
                f"the class folder '{class_folder}' holds no images; put some there or take it away"
            )
        for path in files:
            image = read_image(path)
            first = first or image
            _check_size(image, first, path)
            planes += image.planes
            labels.append(label)
    assert first is not None
    images = torch.frombuffer(planes, dtype=torch.uint8).reshape(-1, 3, first.height, first.width)
    return LabelledImages(images, torch.tensor(labels)), tuple(path.name for path in class_folders)


def read_split_folders(folder: Path, *, classes: int | None = None) -> tuple[LabelledImages, LabelledImages]:
    """Return training and test images from the folders ``train`` and ``test``, with equal classes."""
    train, train_names = read_image_folder(folder / "train", classes=classes)
    test, test_names = read_image_folder(folder / "test", classes=classes)
    if train_names != test_names:
        lone = sorted({*train_names} ^ {*test_names})
        raise DataError(
            f"'{folder}' has {', '.join(lone)} in only one of train and test; both must have the same class"
            " folders: add or take away what differs"
        )
    if train.images.shape[1:] != test.images.shape[1:]:
        raise DataError(
            f"'{folder}' has images of {_times(train)} pixels in train and of {_times(test)} in test;"
            " one size is allowed: bring them to it"
        )
    return train, test


def _check_size(image: Pixels, first: Pixels, path: Path) -> None:
    if (image.height, image.width) != (first.height, first.width):
        raise DataError(
            f"'{path}' has {image.height} × {image.width} pixels and the first image {first.height} ×"
            f" {first.width}; one size is allowed: bring all images to it"
        )


def _times(part: LabelledImages) -> str:
    return f"{part.images.shape[2]} × {part.images.shape[3]}"
