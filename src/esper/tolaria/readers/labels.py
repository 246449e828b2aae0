"""Type of the labelled images that data set readers return, and a check of the labels."""

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from esper.leyline.errors import DataError


class LabelledImages(NamedTuple):
    """Images and labels of the training or test part of a data set."""

    images: Tensor
    """Images as uint8 ``[N, C, H, W]``."""
    labels: Tensor
    """Labels as int64 ``[N]``."""


def check_labels(labels: Tensor, classes: int, path: Path) -> None:
    """Raise DataError if one of the non-negative labels ``[N]`` is not below the number ``classes``."""
    wrong = (labels >= classes).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise DataError(
            f"'{path}' gives item {place} the label {int(labels[place])}; labels from 0 to {classes - 1} are"
            " allowed: state the right number of classes, or copy or download the file again"
        )
