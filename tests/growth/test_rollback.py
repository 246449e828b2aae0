"""Rollback to the last good epoch after a divergence, in a user's loop and in ``esper.grow``."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import esper
from esper.growth import Grown, Growth, GrowthEvent, GrowthWarning
from esper.kasmina.recovery import ROLLBACK_LIMIT
from esper.leyline import Stage
from esper.leyline.errors import DataError
from tests.growth.models import mlp

X, Y = torch.randn(16, 5, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3
GOOD_EPOCHS = 6
"""Number of epochs before the divergence; snapshots are taken after the third and the sixth epoch."""


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    torch.manual_seed(0)


def started(**settings: Any) -> tuple[nn.Module, torch.optim.Optimizer, Growth]:
    net = mlp()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    known = {"slots": ["0", "2"], "controller": None, "mode": "min", "rollback": True}
    return net, optimizer, Growth(net, optimizer, sample=X, **(known | settings))


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net.train()(X), Y).backward()
        optimizer.step()


def evaluation(net: nn.Module) -> Callable[[], float]:
    return lambda: nn.functional.cross_entropy(net.eval()(X), Y).item()


def train_epochs(net: nn.Module, optimizer: torch.optim.Optimizer, growth: Growth, epochs: int) -> list[Any]:
    events = []
    for _ in range(epochs):
        train(net, optimizer)
        events += growth.end_epoch(evaluation(net))
    return events


def scale_weights(net: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(factor)


def states(net: nn.Module, optimizer: torch.optim.Optimizer, growth: Growth) -> Any:
    """Return copies of all weights, of the optimiser's moments by parameter name, and of the slot table."""
    moments = {name: optimizer.state[parameter] for name, parameter in net.named_parameters()}
    return copy.deepcopy((net.state_dict(), moments, growth.network.table.plain()))


def of_kind(events: list[GrowthEvent], kind: str) -> list[str]:
    return [str(event) for event in events if event.kind == kind]


def test_divergence_restores_weights_moments_seeds_and_slot_table_of_the_last_good_epoch() -> None:
    net, optimizer, growth = started()
    growth.germinate("2", "mlp")
    train_epochs(net, optimizer, growth, 3)
    growth.fossilize("2")
    # Snapshots are taken after epoch 4, because of its new fossil, and after epoch 7.
    train_epochs(net, optimizer, growth, 4)
    weights, moments, table = states(net, optimizer, growth)
    # The second seed is planted after the last snapshot, so the rollback removes this seed.
    growth.germinate("0", "lora")
    events = []
    for _ in range(2):  # The governor raises its alarm after two bad epochs in a row.
        train(net, optimizer)
        scale_weights(net, 10.0)
        events += growth.end_epoch(evaluation(net))

    [sentence] = of_kind(events, "rolled_back")
    assert sentence.startswith("epoch 9: divergence: the validation loss is ")
    assert sentence.endswith(": rolled back to epoch 7")
    restored, found, now = states(net, optimizer, growth)
    torch.testing.assert_close(restored, weights, rtol=0.0, atol=0.0)
    torch.testing.assert_close(found, moments, rtol=0.0, atol=0.0)
    assert now["seed_id"] == table["seed_id"]
    assert [report.stage for report in growth.reports()] == [Stage.DORMANT, Stage.FOSSILIZED]
    assert len(optimizer.state) == len(list(net.parameters())) == 14
    assert growth.facts.rolled_back
    assert train_epochs(net, optimizer, growth, 1) == []
    assert growth.facts.val_loss < 1.2
    assert not growth.facts.rolled_back


def test_divergence_after_a_jump_of_the_learning_rate_is_rolled_back() -> None:
    net, optimizer, growth = started()
    train_epochs(net, optimizer, growth, GOOD_EPOCHS)
    wanted = evaluation(net)()
    optimizer.param_groups[0]["lr"] = 10.0
    events = train_epochs(net, optimizer, growth, 2)

    assert [event.kind for event in events] == ["rolled_back"]
    assert evaluation(net)() == wanted


def test_one_epoch_with_a_non_finite_metric_is_rolled_back_to_the_last_good_epoch() -> None:
    net, optimizer, growth = started()
    train_epochs(net, optimizer, growth, 3)
    weights = copy.deepcopy(net.state_dict())
    scale_weights(net, math.nan)
    events = growth.end_epoch(evaluation(net))

    assert of_kind(events, "rolled_back") == ["epoch 4: the loss is nan: rolled back to epoch 3"]
    torch.testing.assert_close(net.state_dict(), weights, rtol=0.0, atol=0.0)


def test_live_seed_that_causes_a_divergence_is_pruned_without_changing_the_host() -> None:
    net, optimizer, growth = started()
    train_epochs(net, optimizer, growth, GOOD_EPOCHS)
    growth.germinate("2", "mlp")
    events = []
    for _ in range(2):
        train(net, optimizer)
        scale_weights(net[2].esper_slot, 50.0)
        host = {name: value.clone() for name, value in net.state_dict().items() if "esper" not in name}
        events += growth.end_epoch(evaluation(net))

    [sentence] = of_kind(events, "rolled_back")
    assert sentence.endswith(": pruned 2")
    torch.testing.assert_close(net.state_dict(), host, rtol=0.0, atol=0.0)
    assert len(optimizer.state) == 6
    assert growth.recovery.rollbacks == 0


def test_diverged_network_is_not_restored_if_rollback_is_off() -> None:
    net, optimizer, growth = started(rollback=False)
    train_epochs(net, optimizer, growth, GOOD_EPOCHS)
    scale_weights(net, 1e3)
    assert train_epochs(net, optimizer, growth, 2) == []
    assert growth.facts.val_loss > 1e3


def test_growth_does_not_roll_back_after_the_maximum_number_of_rollbacks() -> None:
    net, optimizer, growth = started()
    train_epochs(net, optimizer, growth, 3)
    for _ in range(ROLLBACK_LIMIT):
        scale_weights(net, math.nan)
        growth.end_epoch(evaluation(net))
    assert (growth.recovery.rollbacks, growth.recovery.given_up) == (ROLLBACK_LIMIT, True)
    scale_weights(net, math.nan)
    with pytest.warns(GrowthWarning, match="evaluate returned a value that is not finite"):
        assert of_kind(growth.end_epoch(evaluation(net)), "rolled_back") == []


def test_rollback_in_the_first_epoch_restores_the_weights_at_the_call_of_bind() -> None:
    net = mlp()
    growth = Growth(net, sample=X, slots="2", controller=None, mode="min", rollback=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    growth.bind(optimizer)
    weights = copy.deepcopy(net.state_dict())
    train(net, optimizer)
    scale_weights(net, math.nan)
    events = growth.end_epoch(evaluation(net))

    assert of_kind(events, "rolled_back") == ["epoch 1: the loss is nan: rolled back to epoch 0"]
    torch.testing.assert_close(net.state_dict(), weights, rtol=0.0, atol=0.0)
    assert len(optimizer.state) == 0


def test_rollback_also_restores_an_averaged_model_given_as_argument_follow() -> None:
    net = mlp()
    average = AveragedModel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    growth = Growth(
        net, optimizer, sample=X, slots="2", controller=None, mode="min", rollback=True, follow=[average]
    )
    growth.germinate("2", "mlp")
    for _ in range(3):
        train(net, optimizer)
        average.update_parameters(net)
        growth.end_epoch(evaluation(net))
    wanted = copy.deepcopy(average.module.state_dict())
    scale_weights(net, math.nan)
    average.update_parameters(net)
    with pytest.warns(GrowthWarning, match="mlp in 2 has weights that are not finite"):
        events = growth.end_epoch(evaluation(net))

    assert len(of_kind(events, "rolled_back")) == 1
    torch.testing.assert_close(average.module.state_dict(), wanted, rtol=0.0, atol=0.0)


def test_rollback_after_resuming_does_not_restore_weights_from_before_the_resume() -> None:
    net, optimizer, growth = started()
    growth.germinate("2", "mlp")
    train_epochs(net, optimizer, growth, GOOD_EPOCHS)
    growth.fossilize("2")
    saved = copy.deepcopy((growth.state_dict(), net.state_dict(), optimizer.state_dict()))

    resumed = []
    for _ in range(2):
        net, optimizer, growth = started()
        growth.load_state_dict(saved[0])
        net.load_state_dict(saved[1])
        optimizer.load_state_dict(saved[2])
        resumed.append((net, optimizer, growth))
    (net, optimizer, growth), (other, _, broken) = resumed
    train_epochs(net, optimizer, growth, 1)
    wanted = copy.deepcopy(net.state_dict())
    scale_weights(net, math.nan)
    scale_weights(other, math.nan)
    with pytest.warns(GrowthWarning, match="has weights that are not finite"):
        events = growth.end_epoch(evaluation(net))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GrowthWarning)
        broken_events = broken.end_epoch(evaluation(other))

    # The first good epoch after resuming is saved as a snapshot; without a snapshot there is no rollback.
    assert of_kind(events, "rolled_back") == ["epoch 8: the loss is nan: rolled back to epoch 7"]
    torch.testing.assert_close(net.state_dict(), wanted, rtol=0.0, atol=0.0)
    assert of_kind(broken_events, "rolled_back") == []
    assert len(list(other.parameters())) == 14


# --- rollback in esper.grow ---------------------------------------------------------------------------------


class BrokenBatches:
    """Data loader whose inputs are NaN in one epoch."""

    def __init__(self, broken_epoch: int) -> None:
        self.broken_epoch = broken_epoch
        self.reads = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # The first two passes over the loader check the loader and take the sample input.
        self.reads += 1
        factor = math.nan if self.reads == self.broken_epoch + 2 else 1.0
        return iter([(factor * X[i::4], Y[i::4]) for i in range(4)])


def grow(broken_epoch: int, **settings: Any) -> Grown:
    known = {"epochs": 5, "slots": ["0", "2"], "controller": "mlp@2:1", "show": lambda _: None}
    train_loader, val_loader = BrokenBatches(broken_epoch), [(X, Y)]
    loss = nn.functional.cross_entropy
    return esper.grow(mlp(), train_loader, val_loader, loss=loss, **(known | settings))


def test_grow_rolls_back_an_epoch_with_a_nan_training_loss_by_default() -> None:
    grown = grow(broken_epoch=3)

    [event] = [event for event in grown.events if event.kind == "rolled_back"]
    assert str(event) == "epoch 3: the loss is nan: rolled back to epoch 0"
    assert math.isnan(grown.epochs[3].train_loss)
    assert math.isfinite(grown.epochs[3].val_loss)
    assert math.isfinite(grown.epochs[5].train_loss)
    assert grown.epochs[3].val_loss == grown.epochs[0].val_loss
    assert [epoch.params for epoch in grown.epochs[1:4]] == [707, 707, 147]


@pytest.mark.parametrize(
    ("broken_epoch", "settings"),
    [
        pytest.param(1, {}, id="NaN in the first epoch"),
        pytest.param(3, {"rollback": False}, id="rollback off"),
    ],
)
def test_grow_raises_an_error_for_a_nan_training_loss_that_cannot_be_rolled_back(
    broken_epoch: int, settings: dict[str, Any]
) -> None:
    with pytest.raises(DataError, match=f"the training loss is not finite in epoch {broken_epoch}; look for"):
        grow(broken_epoch, **settings)
