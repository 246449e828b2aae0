"""Tasks on the packaged data set of 1,797 handwritten digits, 8×8 pixels; digits.md states its origin."""

from dataclasses import replace
from functools import cache
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from esper.leyline.rules import LifecycleRules
from esper.tolaria.data import Splits, digest_of, split_images
from esper.tolaria.tasks.spec import InstanceDistribution, TaskSpec

HELD_OUT = 360
"""Number of validation samples, and of test samples."""


@cache
def _load_arrays() -> tuple[Tensor, Tensor]:
    with files("esper.tolaria.tasks").joinpath("digits.npz").open("rb") as file, np.load(file) as archive:
        images = torch.from_numpy(archive["images"].astype(np.float32)).unsqueeze(1)
        labels = torch.from_numpy(archive["labels"].astype(np.int64))
    return images, labels


def load_digits(generator: torch.Generator) -> Splits:
    """Return splits of 1,077 training, 360 validation and 360 test images, drawn by ``generator``."""
    images, labels = _load_arrays()
    return split_images(images, labels, validation=HELD_OUT, test=HELD_OUT, generator=generator)


DIGITS = TaskSpec(
    name="digits",
    summary="8×8 digits, host 4-8-8 with 3×3 kernels: already good, little to gain",
    input_shape=(1, 8, 8),
    classes=10,
    load=load_digits,
    digest=lambda: digest_of(*_load_arrays()),
    instances=InstanceDistribution(widths=((4, 8, 8),), kernels=(3,)),
)

DIGITS_IMPAIRED = replace(
    DIGITS,
    name="digits_impaired",
    summary="8×8 digits, host 2-4-8 with 1×1 kernels: blind to shape until it grows",
    instances=InstanceDistribution(widths=((2, 4, 8),), kernels=(1,)),
)

DIGITS_MIXTURE = replace(
    DIGITS,
    name="digits_mixture",
    summary="8×8 digits, hosts that see shape or are blind to it, budgets from 9 to 280 MFLOP",
    instances=InstanceDistribution(
        widths=((4, 4, 8), (4, 4, 12)),
        kernels=(1, 1, 3),
        learning_rates=(0.02, 0.04),
        data_shares=(0.5, 1.0),
        budget_shares=tuple(2.0 ** (-third / 3) for third in range(16)),
    ),
    optimiser="adamw",
    schedule="wsd",
    warmup=5,
    horizon=8,
    batch_size=32,
    budget=280 * 10**6,
    rules=LifecycleRules(
        min_training_epochs=0,
        enters_at_once=True,
        min_prune_age=8,
        embargo_epochs=2,
        blueprints=("conv_light",),
    ),
)
"""Task whose best action depends on the instance. A host with 3×3 kernels gains most without seeds. A host
with 1×1 kernels, which cannot see shapes, gains most from an early seed. A controller chooses only the slot
and the time of a germination: there is one blueprint, and no seed reaches the minimum age for pruning.
"""
