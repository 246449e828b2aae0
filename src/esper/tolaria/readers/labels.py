"""What the readers of labelled images give back, and the rule for labels."""

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from esper.leyline.errors import DataError


class LabelledImages(NamedTuple):
    """One part of a data set, training or test."""

    images: Tensor
    """uint8 ``[N, C, H, W]``."""
    labels: Tensor
    """int64 ``[N]``."""


def check_labels(labels: Tensor, classes: int, path: Path) -> None:
    """Labels ``[N]``, none of them negative, must name one of ``classes`` classes."""
    wrong = (labels >= classes).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise DataError(
            f"'{path}' gives item {place} the label {int(labels[place])}; labels from 0 to {classes - 1} are"
            " allowed: state the right number of classes, or copy or download the file again"
        )
