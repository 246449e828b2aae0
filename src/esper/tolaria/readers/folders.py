"""Images in one folder per class; the folders' names, sorted, are the classes."""

from pathlib import Path

import torch

from esper.leyline.errors import DataError
from esper.tolaria.readers.files import list_folder
from esper.tolaria.readers.images import Pixels, read_image
from esper.tolaria.readers.parts import LabelledImages, Part


def read_image_folder(
    folder: Path, *, size: tuple[int, int] | None = None, grey: bool = False, classes: int | None = None
) -> LabelledImages:
    """All images of all classes, class by class and in the order of file names.

    ``size`` is (height, width); without it all images must have one size. RGB, or one channel when ``grey``.
    ``classes`` is how many there must be, where that is known.
    """
    if size is not None and min(size) < 1:
        raise DataError(
            f"images of '{folder}' cannot be made {size[0]} × {size[1]} pixels; ask for 1 × 1 or more"
        )
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
        for path in _image_files(class_folder):
            image = read_image(path, size=size, grey=grey)
            first = first or image
            _check_size(image, first, path)
            planes += image.planes
            labels.append(label)
    assert first is not None
    images = torch.frombuffer(planes, dtype=torch.uint8)
    images = images.reshape(len(labels), 1 if grey else 3, first.height, first.width)
    return LabelledImages(images, torch.tensor(labels), tuple(path.name for path in class_folders))


def read_split_folders(
    folder: Path, *, size: tuple[int, int] | None = None, grey: bool = False, classes: int | None = None
) -> tuple[Part, Part]:
    """Training and test part from ``train`` and ``test`` below ``folder``, with the same classes."""
    train, test = (
        read_image_folder(folder / name, size=size, grey=grey, classes=classes) for name in ("train", "test")
    )
    if train.classes != test.classes:
        lone = sorted({*train.classes} ^ {*test.classes})
        raise DataError(
            f"'{folder}' has {', '.join(lone)} in only one of train and test; both must have the same class"
            " folders: add or take away what differs"
        )
    if train.images.shape[1:] != test.images.shape[1:]:
        raise DataError(
            f"'{folder}' has images of {_times(train)} pixels in train and of {_times(test)} in test;"
            " one size is allowed: give a size to bring them to"
        )
    return Part(train.images, train.labels), Part(test.images, test.labels)


def _image_files(class_folder: Path) -> list[Path]:
    files = list_folder(class_folder, "a folder with the images of one class")
    if not files:
        raise DataError(f"the class folder '{class_folder}' holds no images; put some there or take it away")
    return files


def _check_size(image: Pixels, first: Pixels, path: Path) -> None:
    if (image.height, image.width) != (first.height, first.width):
        raise DataError(
            f"'{path}' has {image.height} × {image.width} pixels and the first image {first.height} ×"
            f" {first.width}; one size is allowed: give a size to bring all images to"
        )


def _times(part: LabelledImages) -> str:
    return f"{part.images.shape[2]} × {part.images.shape[3]}"
