"""CPU time of a training step without blended seeds, in two ratios: empty slots to no slots, and one
incubating seed to empty slots. The measured CPU times are only printed; the benchmark sets no upper limit for
them.
"""

import copy

import pytest
import torch
from torch import nn

from benchmarks.bench_step import CLIP, sgd, step_by_hand
from benchmarks.timing import cpu_times, ratio
from esper.leyline import BlueprintAction, Stage
from esper.tolaria.minibatch import Learner
from esper.tolaria.tasks.spec import CLASSIFICATION
from tests.tolaria.building import cnn, digits, grown_model


@pytest.mark.parametrize(
    ("task", "widths", "kernel"), [("digits_impaired", (2, 4, 8), 1), ("digits", (4, 8, 8), 3)]
)
def bench_a_step_with_nothing_blended(task: str, widths: tuple[int, ...], kernel: int) -> None:
    host = cnn(widths, kernel)
    bare = nn.Sequential(*copy.deepcopy(host).segments).to(memory_format=torch.channels_last)
    bare_optimiser = sgd(bare)
    empty, empty_optimiser = grown_model({}, host=copy.deepcopy(host))
    shadowed, shadowed_optimiser = grown_model(
        {1: BlueprintAction.CONV_HEAVY}, host=host, stage=Stage.TRAINING
    )
    x, y = digits(64)
    empty.train()
    shadowed.train()
    torch.testing.assert_close(bare(x), empty(x))

    loss = CLASSIFICATION.loss
    times = cpu_times(
        {
            "bare host": lambda: step_by_hand(bare, bare_optimiser, x, y),
            "empty slots": lambda: Learner(empty, empty_optimiser, loss, clip=CLIP).run(x, y),
            "one incubating": lambda: Learner(shadowed, shadowed_optimiser, loss, clip=CLIP).run(x, y),
        },
        repeats=40,
    )
    ratio(task, times, "empty slots", "bare host")
    ratio(task, times, "one incubating", "empty slots")
