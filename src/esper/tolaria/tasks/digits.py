"""The embedded digits: 1,797 hand-written digits of 8×8 pixels, see digits.md for their origin."""

from dataclasses import replace
from functools import cache
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from esper.tolaria.data import Splits, digest_of, split_images
from esper.tolaria.tasks.spec import InstanceDistribution, TaskSpec

VALIDATION = 360
TEST = 360


@cache
def _load_arrays() -> tuple[Tensor, Tensor]:
    with files("esper.tolaria.tasks").joinpath("digits.npz").open("rb") as file, np.load(file) as archive:
        images = torch.from_numpy(archive["images"].astype(np.float32)).unsqueeze(1)
        labels = torch.from_numpy(archive["labels"].astype(np.int64))
    return images, labels


def load_digits(generator: torch.Generator) -> Splits:
    """1,077 images to train on, 360 to validate, 360 to test, split by ``generator``."""
    images, labels = _load_arrays()
    return split_images(images, labels, validation=VALIDATION, test=TEST, generator=generator)


def digits_digest() -> str:
    """A digest of the packaged images and labels."""
    return digest_of(*_load_arrays())


DIGITS = TaskSpec(
    name="digits",
    summary="8×8 digits, host 4-8-8 with 3×3 kernels: already good, little to gain",
    input_shape=(1, 8, 8),
    classes=10,
    load=load_digits,
    digest=digits_digest,
    instances=InstanceDistribution(widths=((4, 8, 8),), kernels=(3,)),
)

DIGITS_IMPAIRED = replace(
    DIGITS,
    name="digits_impaired",
    summary="8×8 digits, host 2-4-8 with 1×1 kernels: blind to shape until it grows",
    instances=InstanceDistribution(widths=((2, 4, 8),), kernels=(1,)),
)
