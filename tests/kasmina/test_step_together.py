"""One step of several optimisers at once, against each by itself."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from esper.kasmina.optim import step_together


def networks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(5, 4), nn.Conv2d(3, 4, 3), nn.Linear(2, 2)]


RATES = (0.1, 0.05, 0.03)
KINDS: dict[str, Callable[[nn.Module, float], Optimizer]] = {
    "momentum": lambda net, rate: SGD(net.parameters(), lr=rate, momentum=0.9),
    "another momentum": lambda net, rate: SGD(net.parameters(), lr=rate, momentum=0.5),
    "nesterov": lambda net, rate: SGD(net.parameters(), lr=rate, momentum=0.9, nesterov=True),
    "decay": lambda net, rate: SGD(net.parameters(), lr=rate, momentum=0.9, weight_decay=0.1),
    "no momentum": lambda net, rate: SGD(net.parameters(), lr=rate),
    "adamw": lambda net, rate: AdamW(net.parameters(), lr=rate),
    "two groups": lambda net, rate: SGD([{"params": [p]} for p in net.parameters()], lr=rate, momentum=0.9),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_those_of_single_steps_bit_for_bit(kind: str) -> None:
    ours, theirs = networks(), networks()
    made = KINDS["momentum"], KINDS["momentum"], KINDS[kind]
    pairs = [
        [make(net, rate) for make, net, rate in zip(made, nets, RATES, strict=True)]
        for nets in (ours, theirs)
    ]
    for step in range(4):
        for nets in (ours, theirs):
            generator = torch.Generator().manual_seed(step)
            for parameter in (p for net in nets for p in net.parameters()):
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            nets[2].weight.grad = nets[2].weight.grad if step % 2 else None  # type: ignore[union-attr]
        step_together(pairs[0])
        for optimiser in pairs[1]:
            optimiser.step()
    for own, other in zip(ours, theirs, strict=True):
        for name, weight in own.named_parameters():
            assert torch.equal(weight, other.get_parameter(name)), name


def test_hooks_of_an_optimiser_are_called() -> None:
    (net, *_), seen = networks(), []
    optimiser = KINDS["momentum"](net, 0.1)
    optimiser.register_step_post_hook(lambda *_: seen.append("stepped"))
    for _ in range(2):
        net(torch.ones(1, 5)).sum().backward()
        step_together([optimiser])
    assert seen == ["stepped"] * 2
