"""Tasks of regression on tables: prices of diamonds, and outputs of a teacher network of known width."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Final

import torch
from torch import Generator, Tensor

from esper.kasmina.random_streams import TorchStream
from esper.tolaria.data import GuardedTest, Samples, Splits, digest_of
from esper.tolaria.tasks.hosts import MLPHost
from esper.tolaria.tasks.packaged import packaged
from esper.tolaria.tasks.spec import InstanceDistribution, TaskSpec, regression, scaling_study

Table = tuple[Tensor, Tensor]
"""Inputs ``[row, column]`` and targets ``[row, 1]``."""
HELD_OUT: Final = (1024, 8192)
"""Number of validation and of test rows."""
FARTHEST: Final = 5.0
"""Largest standardised input; larger ones, which are errors of measurement, are clipped."""
TEACHER_INPUTS: Final = 16
TEACHER_BLOCKS: Final = 4
TEACHER_ROWS: Final = 50_000


@cache
def diamonds() -> Table:
    """Return nine properties of 53,940 diamonds, and the logarithms of their prices."""
    data = packaged("diamonds")
    return data["inputs"].float(), data["price"].float().log()[:, None]


@cache
def teacher(width: int) -> Table:
    """Return normal inputs, and the outputs of a residual MLP of four blocks of ``width`` for them.

    The weights of its blocks are three times as large as those of a new host, so that the function is not
    almost linear.
    """
    with TorchStream(0), torch.no_grad():
        net = MLPHost(width, blocks=TEACHER_BLOCKS, slots=1, input_shape=(TEACHER_INPUTS,), classes=1)
        for weight in net.segments[0].parameters():
            weight.mul_(3.0)
        inputs = torch.randn(TEACHER_ROWS, TEACHER_INPUTS)
        return inputs, net(inputs)


def split_table(source: Callable[[], Table], generator: Generator) -> Splits:
    """Return random splits of a table, standardised by its training split."""
    inputs, targets = source()
    order = torch.randperm(len(inputs), generator=generator)
    parts = order.split([len(inputs) - sum(HELD_OUT), *HELD_OUT])
    scaled = []
    for column, farthest in ((inputs, FARTHEST), (targets, math.inf)):
        deviation, mean = torch.std_mean(column[parts[0]], dim=0)
        scaled.append(((column - mean) / deviation).clamp_(-farthest, farthest))
    train, validation, test = (Samples(scaled[0], scaled[1], part) for part in parts)
    return Splits(train, validation, GuardedTest(test))


DIAMONDS_SCALING = scaling_study(
    TaskSpec(
        name="diamonds_scaling",
        summary="Prices of 53,940 diamonds, a residual MLP of one block that may become six",
        input_shape=(9,),
        classes=1,
        load=partial(split_table, diamonds),
        digest=lambda: digest_of(*diamonds()),
        instances=InstanceDistribution(widths=((64,) * 5,), learning_rates=(2e-3,), trunks=(1,)),
        objective=regression(torch.tensor([-1.0, 1.0])),  # Standardised targets have variance 1.
        host="mlp",
    ),
    budget=100 * 10**9,
    batch_size=64,
)


def teacher_task(width: int) -> TaskSpec:
    """Return the task of learning the function of a residual MLP of four blocks of ``width``."""
    return replace(
        DIAMONDS_SCALING,
        name="teacher_scaling",
        summary=f"A teacher of four blocks of width {width}, a residual MLP of one block that may become six",
        input_shape=(TEACHER_INPUTS,),
        load=partial(split_table, partial(teacher, width)),
        digest=lambda: digest_of(*teacher(width)),
    )


TEACHER_SCALING = teacher_task(32)
