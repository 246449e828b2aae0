"""Reader of image files, also in one folder per class, whose sorted names are the classes.

The image format is recognised by content, and incomplete files are refused. Damage inside the pixel data of
JPEG, BMP and WebP is not detected, because these formats have no checksum; the checksum of PNG is verified.
"""

import warnings
from io import BytesIO
from pathlib import Path
from typing import Final

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from esper.leyline.errors import DataError
from esper.tolaria.readers.files import AGAIN, LabelledImages, list_folder, read_bytes, times

WANTED: Final = "an image file"
FORMATS: Final = ("PNG", "JPEG", "BMP", "WEBP")
MAX_PIXELS: Final = 1 << 26  # Largest accepted image, 8192 × 8192 pixels; Pillow's limit can be disabled.
EIGHT_BIT_MODES: Final = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
"""Pillow image modes with at most 8 bits per channel; Pillow would silently clip pixels with more bits to
255."""


def read_image(path: Path) -> Tensor:
    """Decode an image as RGB ``[3, height, width]``; EXIF rotation is not applied.

    Raises:
        DataError: The file is no supported image, is damaged, or has transparent or too many pixels.
    """
    content = bytes(read_bytes(path, WANTED))
    try:
        with warnings.catch_warnings():
            # Pillow only warns of suspiciously large images and invalid metadata; the warnings become errors.
            warnings.simplefilter("error", RuntimeWarning)
            warnings.simplefilter("error", UserWarning)
            with Image.open(BytesIO(content), formats=FORMATS) as image:
                image.verify()  # Image.verify() checks the checksums of a PNG file.
            with Image.open(BytesIO(content), formats=FORMATS) as image:
                _check(image, path)
                pixels = np.array(_opaque(image, path).convert("RGB"))
                return torch.from_numpy(pixels).permute(2, 0, 1)
    except DataError:
        raise
    except UnidentifiedImageError as error:
        raise DataError(
            f"'{path}' is none of {', '.join(FORMATS)}, or its header is damaged; only these are read:"
            f" convert it, {AGAIN}, or take it away"
        ) from error
    except Exception as error:
        # The image file is in memory, so every exception is caused by its content; Pillow's decoders raise
        # many types of exceptions.
        raise DataError(
            f"'{path}' cannot be decoded ({str(error) or type(error).__name__}); a whole image is expected"
            f" there: {AGAIN}, or save it anew with an image program"
        ) from error


def _check(image: Image.Image, path: Path) -> None:
    """Check size, mode and number of frames in an image's header, before memory is allocated for pixels."""
    if image.width * image.height > MAX_PIXELS:
        raise DataError(
            f"'{path}' states {image.height} × {image.width} pixels; at most {MAX_PIXELS} are allowed:"
            " make it smaller"
        )
    if image.mode not in EIGHT_BIT_MODES:
        raise DataError(
            f"'{path}' has pixels of Pillow's mode {image.mode}; 8 bits per channel are allowed: convert it"
        )
    frames = getattr(image, "n_frames", 1)
    if frames != 1:
        raise DataError(f"'{path}' holds {frames} pictures; one per file is allowed: split it")


def _opaque(image: Image.Image, path: Path) -> Image.Image:
    """Return the image without its alpha channel, which must be opaque everywhere."""
    if not image.has_transparency_data:
        return image
    colours = image.convert("RGBA")
    if colours.getchannel("A").getextrema() != (255, 255):
        raise DataError(
            f"'{path}' has transparent pixels; opaque ones are allowed: put it on a background of your choice"
        )
    return colours


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
        found = ", ".join(path.name for path in class_folders)
        raise DataError(
            f"'{folder}' has {len(class_folders)} class folders ({found}); {classes} are needed: add what is"
            " missing, or take away what does not belong there"
        )
    images: list[Tensor] = []
    labels: list[int] = []
    for label, class_folder in enumerate(class_folders):
        files = list_folder(class_folder, "a folder with the images of one class")
        if not files:
            raise DataError(
                f"the class folder '{class_folder}' holds no images; put some there or take it away"
            )
        for path in files:
            image = read_image(path)
            images.append(image)
            labels.append(label)
            if image.shape != images[0].shape:
                raise DataError(
                    f"'{path}' has {times(image.shape[1:])} pixels and the first image"
                    f" {times(images[0].shape[1:])}; one size is allowed: bring all images to it"
                )
    names = tuple(path.name for path in class_folders)
    return LabelledImages(torch.stack(images), torch.tensor(labels)), names


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
            f"'{folder}' has images of {times(train.images.shape[2:])} pixels in train and of"
            f" {times(test.images.shape[2:])} in test; one size is allowed: bring them to it"
        )
    return train, test
