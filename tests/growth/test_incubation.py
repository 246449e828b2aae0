"""Incubation: a new seed learns for some epochs before it changes the output of the network."""

from typing import Any

import pytest
import torch
from torch import nn

import esper
from esper.growth import Grown, Growth
from esper.kasmina.compute import forward_flops
from esper.leyline import Stage
from esper.leyline.errors import EsperError
from tests.growth.models import mlp

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(16, 5, generator=GENERATOR), torch.arange(16) % 3
BATCHES = [(X[i::4], Y[i::4]) for i in range(4)]


def network() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


def losses(net: nn.Module) -> list[float]:
    net.eval()
    return [nn.functional.cross_entropy(net(x), y).item() for x, y in BATCHES]


def host_weights(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items() if "esper_slot" not in name}


def train_epoch(net: nn.Module, optimizer: torch.optim.Optimizer, growth: Growth) -> None:
    """Train one epoch in a user's loop that calls ``incubate`` between backward pass and optimiser step."""
    net.train()
    for x, y in BATCHES:

        def batch_loss(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            return nn.functional.cross_entropy(net(x), y)

        optimizer.zero_grad()
        batch_loss().backward()
        growth.incubate(batch_loss)
        optimizer.step()


def incubated(blueprint: str | None, epochs: int) -> tuple[nn.Module, Growth, list[Any]]:
    """Train a network with a seed of ``blueprint``; return host weights and output after every epoch."""
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    growth = Growth(net, optimizer, sample=X, slots="2", controller=None, mode="min", incubation_epochs=2)
    if blueprint is not None:
        growth.germinate("2", blueprint)
    course = []
    for _ in range(epochs):
        train_epoch(net, optimizer, growth)
        course.append((host_weights(net), net.eval()(X).detach()))
        growth.end_epoch(lambda: losses(net))
    return net, growth, course


def test_incubating_seed_changes_neither_output_nor_host_weights_in_a_users_training_loop() -> None:
    _, growth, course = incubated("mlp", 2)
    _, _, without = incubated(None, 2)

    torch.testing.assert_close(course, without, rtol=0.0, atol=0.0)
    assert growth.reports()[0].stage in {Stage.BLENDING, Stage.HOLDING}


def test_seed_in_a_users_training_loop_is_blended_in_after_its_incubation_epochs() -> None:
    net, growth, course = incubated("mlp", 4)
    _, _, without = incubated(None, 4)

    assert growth.reports()[0].stage in {Stage.BLENDING, Stage.HOLDING}
    assert not torch.equal(course[3][1], without[3][1])
    with_seed = net.eval()(X)
    growth.set_alpha("2", 0.0)
    assert not torch.equal(net(X), with_seed)


def test_one_epoch_of_incubation_changes_every_tensor_of_the_seed() -> None:
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    growth = Growth(net, optimizer, sample=X, slots="2", controller=None, incubation_epochs=2, mode="max")
    growth.germinate("2", "mlp")
    born = [p.detach().clone() for p in net[2].esper_slot.parameters()]
    train_epoch(net, optimizer, growth)

    assert growth.reports()[0].stage is Stage.TRAINING
    changed = [not torch.equal(p, b) for p, b in zip(net[2].esper_slot.parameters(), born, strict=True)]
    assert all(changed)


def grow(controller: str | None) -> Grown:
    return esper.grow(
        network(),
        BATCHES,
        BATCHES,
        loss=nn.functional.cross_entropy,
        epochs=6,
        slots="2",
        controller=controller,
        incubation_epochs=2,
        show=lambda _: None,
    )


def test_grow_blends_a_seed_in_after_its_incubation_epochs_and_charges_their_compute() -> None:
    grown, without = grow("mlp@2:1"), grow(None)

    val_losses = [[epoch.val_loss for epoch in each.epochs] for each in (grown, without)]
    # The seed is planted after epoch 1; the output of the network changes after two more epochs.
    assert val_losses[0][:4] == val_losses[1][:4]
    assert all(a != b for a, b in zip(val_losses[0][4:], val_losses[1][4:], strict=True))
    assert grown.ledger.incubation > 0
    assert without.ledger.incubation == 0


@pytest.mark.parametrize("epochs", [-1, 1.5])
def test_growth_refuses_a_negative_or_fractional_number_of_incubation_epochs(epochs: Any) -> None:
    net = network()
    with pytest.raises(EsperError, match=f"^incubation_epochs is {epochs}; it must be"):
        Growth(net, torch.optim.SGD(net.parameters()), sample=X, incubation_epochs=epochs, mode="max")


def test_flops_include_the_seed_as_soon_as_its_incubation_has_ended() -> None:
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    growth = Growth(net, optimizer, sample=X, slots="2", controller=None, mode="min", incubation_epochs=2)
    without = growth.flops
    growth.germinate("2", "mlp_small")
    flops = []
    for _ in range(3):
        train_epoch(net, optimizer, growth)
        growth.end_epoch(lambda: losses(net))
        flops.append(growth.flops)
    assert flops == [without, forward_flops(net, X), forward_flops(net, X)]
    assert forward_flops(net, X) > without
