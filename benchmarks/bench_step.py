"""Time of a training step of a grown network relative to that of an equal network written by hand without
slots.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

from benchmarks.timing import cpu_times, ratio
from esper.kasmina.network import MorphogeneticModel
from esper.kasmina.slot import detach
from esper.leyline import BlueprintAction, Stage
from esper.tolaria.minibatch import Learner
from esper.tolaria.tasks.spec import CLASSIFICATION
from tests.tolaria.building import cnn, digits, grown_model, set_stage

ALPHA = 0.7
CLIP = 5.0
LIMIT = 1.25


class HandWritten(nn.Module):
    """Grown network written by hand without slots: three blocks, seeds behind the first two blocks, and a
    head.
    """

    def __init__(self, model: MorphogeneticModel) -> None:
        super().__init__()
        self.seed0, self.seed1 = model.slot(0).seed, model.slot(1).seed
        detach(model.host)
        self.block0, self.block1, self.block2, self.head = model.host.segments

    def forward(self, x: Tensor) -> Tensor:
        h = self.block0(x)
        h = torch.add(h, self.seed0(h), alpha=ALPHA)
        h = self.block1(h)
        h = torch.add(h, self.seed1(h), alpha=ALPHA)
        return self.head(self.block2(h))


def step_by_hand(network: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimiser.zero_grad()
    loss = CLASSIFICATION.loss(network(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), CLIP, foreach=True)
    optimiser.step()


def sgd(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, foreach=True)


@pytest.mark.parametrize("blueprint", [BlueprintAction.CONV_HEAVY, BlueprintAction.CONV_LIGHT])
@pytest.mark.parametrize(
    ("task", "widths", "kernel"), [("digits_impaired", (2, 4, 8), 1), ("digits", (4, 8, 8), 3)]
)
def bench_a_step_with_two_blended_seeds(
    task: str, widths: tuple[int, ...], kernel: int, blueprint: BlueprintAction
) -> None:
    model, optimiser = grown_model({0: blueprint, 1: blueprint}, host=cnn(widths, kernel))
    for slot in (0, 1):
        set_stage(model, slot, Stage.BLENDING, alpha=ALPHA)
    model.train()
    network = HandWritten(copy.deepcopy(model)).to(memory_format=torch.channels_last)
    by_hand = sgd(network)
    x, y = digits(64)
    torch.testing.assert_close(network(x), model(x))

    times = cpu_times(
        {
            "esper": lambda: Learner(model, optimiser, CLASSIFICATION.loss, clip=CLIP).run(x, y),
            "by hand": lambda: step_by_hand(network, by_hand, x, y),
        },
        repeats=40,
    )
    title = f"{task}, two {blueprint.name.lower()} seeds"
    ratio(title, times, "esper", "by hand", at_most=LIMIT)
