"""Tasks on images: packaged clothes and glyphs, Fashion-MNIST and CIFAR-10 from files, and image folders."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Generator

from esper.leyline.errors import DataError
from esper.tolaria.data import GuardedTest, Samples, Scale, Splits, digest_of, split_images
from esper.tolaria.readers.binary import CIFAR_CLASSES, read_cifar_binary, read_labelled_idx
from esper.tolaria.readers.files import LabelledImages, find_data, list_folder
from esper.tolaria.readers.image_files import read_image_folder, read_split_folders
from esper.tolaria.tasks.packaged import packaged
from esper.tolaria.tasks.spec import InstanceDistribution, TaskSpec, scaling_study

FASHION_HINT: Final = "install Debian's package dataset-fashion-mnist, or put the four IDX files there"
CIFAR_HINT: Final = (
    "put the binary batches (data_batch_1.bin …) there, or class folders of images below train and test"
)

Parts = tuple[LabelledImages, LabelledImages]
"""Training and test images of a data set."""


def fashion() -> Parts:
    """Return Fashion-MNIST at 28×28 pixels."""
    return _read_idx(find_data("fashion-mnist", FASHION_HINT))


def fashion14() -> Parts:
    """Return Fashion-MNIST at 14×14 pixels; each pixel is the mean of 2×2 original pixels."""
    return _pooled(find_data("fashion-mnist", FASHION_HINT))


def cifar() -> Parts:
    """Return CIFAR-10 from its binary batches, or from class folders of image files."""
    folder = find_data("cifar-10", CIFAR_HINT)
    names = {path.name for path in list_folder(folder, "a folder with CIFAR-10")}
    return _read_folders(folder, classes=CIFAR_CLASSES) if "train" in names else _read_batches(folder)


# Data sets are cached by folder for the whole process, so that all episodes draw from the same tensors.
_read_idx = cache(read_labelled_idx)
_read_batches = cache(read_cifar_binary)
_read_folders = cache(read_split_folders)


@cache
def _pooled(folder: Path) -> Parts:
    def halve(part: LabelledImages) -> LabelledImages:
        pooled = torch.cat([F.avg_pool2d(chunk.float(), 2) for chunk in part.images.split(4096)])
        return LabelledImages(pooled.round().to(torch.uint8), part.labels)

    train, test = _read_idx(folder)
    return halve(train), halve(test)


def _loader(
    source: Callable[[], Parts],
    shape: tuple[int, int, int],
    count: int,
    held_out: int,
    tested: int | None = None,
) -> Callable[[Generator], Splits]:
    """Return a function that draws training, validation and test split of an episode.

    Args:
        source: Function that returns the data set.
        shape: Channels, height and width that every image must have.
        count: Number of training samples.
        held_out: Number of validation samples.
        tested: Number of test samples; ``held_out`` unless given.
    """

    def load(generator: Generator) -> Splits:
        offered, reserved = source()
        _check(offered, shape, count + held_out, "train on and validate with")
        _check(reserved, shape, tested or held_out, "test with")
        order = torch.randperm(len(offered.labels), generator=generator)
        chosen, validating = order[:count], order[count : count + held_out]
        testing = torch.randperm(len(reserved.labels), generator=generator)[: tested or held_out]
        scale = Scale.of(offered.images[chosen])
        train = Samples(*offered, chosen, scale)
        test = GuardedTest(Samples(*reserved, testing, scale))
        return Splits(train, Samples(*offered, validating, scale), test)

    return load


def _check(part: LabelledImages, shape: tuple[int, int, int], count: int, purpose: str) -> None:
    found = tuple(part.images.shape[1:])
    if found != shape:
        raise DataError(
            f"the data set has images of shape {found}; the task needs {shape}: put the right data set there"
        )
    if len(part.labels) < count:
        raise DataError(
            f"the data set has {len(part.labels)} images to {purpose}; the task needs {count}: put the whole"
            " data set there"
        )


def _digest(source: Callable[[], Parts]) -> Callable[[], str]:
    return cache(lambda: digest_of(*(tensor for part in source() for tensor in part)))


FASHION14 = TaskSpec(
    name="fashion14",
    summary="Fashion-MNIST at 14×14, 4,096 images per episode, host 4-8-16 with 3×3 kernels",
    input_shape=(1, 14, 14),
    classes=10,
    load=_loader(fashion14, (1, 14, 14), 4096, 1024),
    digest=_digest(fashion14),
    instances=InstanceDistribution(widths=((4, 8, 16),), kernels=(3,)),
    horizon=12,
    batches_per_epoch=32,
)
FASHION14_IMPAIRED = replace(
    FASHION14,
    name="fashion14_impaired",
    summary="Fashion-MNIST at 14×14, 4,096 images per episode, host 4-8-8 with 1×1 kernels",
    instances=InstanceDistribution(widths=((4, 8, 8),), kernels=(1,)),
)
FASHION = replace(
    FASHION14,
    name="fashion",
    summary="Fashion-MNIST, up to 16,384 images per episode; hosts, slots and rents vary",
    input_shape=(1, 28, 28),
    load=_loader(fashion, (1, 28, 28), 16_384, 2048),
    digest=_digest(fashion),
    instances=InstanceDistribution(
        widths=((4, 8, 16), (8, 16, 32)),
        kernels=(1, 3),
        learning_rates=(0.02, 0.05),
        rents=(0.001, 0.01),
        data_shares=(0.5, 1.0),
        vary_slots=True,
    ),
    batches_per_epoch=64,
)
FASHION_SCALING = scaling_study(
    replace(
        FASHION14,
        name="fashion_scaling",
        summary="Fashion-MNIST at 14×14, a residual host of one block that may become eight; 1.2 TFLOP",
        load=_loader(fashion14, (1, 14, 14), 50_000, 1024, tested=8192),
        instances=InstanceDistribution(widths=((16,) * 7,), learning_rates=(2e-3,), trunks=(1,)),
        host="residual",
    ),
    budget=1_200 * 10**9,
)
CIFAR = TaskSpec(
    name="cifar",
    summary="CIFAR-10, up to 16,384 images per episode, shifted and mirrored; hosts, slots and rents vary",
    input_shape=(3, 32, 32),
    classes=CIFAR_CLASSES,
    load=_loader(cifar, (3, 32, 32), 16_384, 2048),
    digest=_digest(cifar),
    instances=replace(FASHION.instances, widths=((8, 16, 32), (16, 32, 64)), kernels=(3,)),
    augment=True,
    batches_per_epoch=64,
)
CIFAR_IMPAIRED = replace(
    CIFAR,
    name="cifar_impaired",
    summary="CIFAR-10, 4,096 images per episode, host 8-16-16 with 1×1 kernels",
    load=_loader(cifar, (3, 32, 32), 4096, 1024),
    instances=InstanceDistribution(widths=((8, 16, 16),), kernels=(1,)),
    batches_per_epoch=32,
)

# --- scaling tasks ----------------------------------------------------------------------------------

GLYPH_ENDS: Final = (0.76, 0.80)
"""Shares of the letters at which the training split and the validation split end."""


@cache
def clothes(side: int) -> LabelledImages:
    """Return 16,000 images of Fashion-MNIST in 16 grey levels, at 28×28 or 14×14 pixels."""
    data = packaged("clothes")
    images = F.avg_pool2d(16.0 * data["images"][:, None].float(), 28 // side)
    return LabelledImages(images.to(torch.uint8), data["labels"].long())


def glyphs(generator: Generator) -> Splits:
    """Return splits of the glyphs by letter, so that a letter is in one split in all its fonts."""
    data = packaged("glyphs")
    images, labels = data["images"][:, None], data["labels"].long()
    letters, letter = data["groups"].int().unique(return_inverse=True)
    place = torch.randperm(len(letters), generator=generator)[letter] / len(letters)
    part = torch.bucketize(place, torch.tensor(GLYPH_ENDS))
    order = torch.randperm(len(labels), generator=generator)
    index = [order[part[order] == number] for number in range(3)]
    scale = Scale.of(images[index[0]])
    train, validation, test = (Samples(images, labels, rows, scale) for rows in index)
    return Splits(train, validation, GuardedTest(test))


def _scaling(
    name: str, summary: str, source: Callable[[], LabelledImages], shape: tuple[int, ...], budget: int
) -> TaskSpec:
    """Return the scaling task of images, of which a 32nd is for validation and a quarter for the test."""

    def load(generator: Generator) -> Splits:
        images, labels = source()
        count = len(labels)
        return split_images(images, labels, validation=count // 32, test=count // 4, generator=generator)

    return replace(
        FASHION_SCALING,
        name=name,
        summary=f"{summary}, a residual host of one block that may become six",
        input_shape=shape,
        load=load,
        digest=lambda: digest_of(*source()),
        instances=InstanceDistribution(widths=((16,) * 5,), learning_rates=(2e-3,), trunks=(1,)),
        budget=budget,
    )


CLOTHES14_SCALING = _scaling(
    "clothes14_scaling", "16,000 clothes at 14×14", partial(clothes, 14), (1, 14, 14), 400 * 10**9
)
CLOTHES28_SCALING = _scaling(
    "clothes28_scaling", "16,000 clothes at 28×28", partial(clothes, 28), (1, 28, 28), 600 * 10**9
)
VIT_SCALING = replace(
    CLOTHES28_SCALING,
    name="vit_scaling",
    summary="16,000 clothes at 28×28, a ViT of one block that may become six",
    instances=InstanceDistribution(widths=((32,) * 5,), learning_rates=(2e-3,), trunks=(1,)),
    host="vit",
    budget=200 * 10**9,
)
GLYPHS_SCALING = replace(
    CLOTHES14_SCALING,
    name="glyphs_scaling",
    summary="Scripts of unseen letters at 16×16, a residual host of one block that may become six",
    input_shape=(1, 16, 16),
    load=glyphs,
    digest=lambda: digest_of(*packaged("glyphs").values()),
    held_out=True,
)


@cache
def image_scaling(folder: Path | None) -> TaskSpec:
    """Return the scaling task of the images in ``folder``, or in the data set ``images``.

    The folder has one folder of images per class, or such folders below ``train`` and ``test``.
    """
    where = folder or find_data("images", "put one folder of images per class there")
    names = {path.name for path in list_folder(where, "a folder with one folder of images per class")}
    if {"train", "test"} <= names:
        found = LabelledImages(*map(torch.cat, zip(*_read_folders(where), strict=True)))
    else:
        found, _ = read_image_folder(where)
    classes = int(found.labels.max()) + 1
    if classes < 2:
        raise DataError(f"'{where}' has images of one class; put one folder for each of two or more there")
    summary, shape = f"{len(found.labels):,} images of {classes} classes", tuple(found.images.shape[1:])
    return replace(_scaling("image_scaling", summary, lambda: found, shape, 400 * 10**9), classes=classes)
