"""Batch statistics that fit the network which is scored."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from esper import MorphogeneticModel, wrap
from esper.kasmina.hosts import SegmentedHost
from esper.leyline import BlueprintAction, LifecycleRules, SlotConfig, Stage, Style
from esper.leyline.errors import EsperError
from esper.tolaria.calibration import CALIBRATION_SAMPLES, recalibrate
from esper.tolaria.counterfactual import measure
from esper.tolaria.objective import CLASSIFICATION
from tests.tolaria.building import bits, digits, set_stage, stir


class Net(nn.Module):
    """A small network with BatchNorm, and dropout that must stay silent."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.body = nn.Conv2d(4, 4, 3, padding=1)
        self.second = nn.BatchNorm2d(4, momentum=0.3)
        self.head = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.second(self.body(self.drop(torch.relu(self.norm(self.stem(x)))))))
        return self.head(h.mean(dim=(2, 3)))


class SegmentedNet(SegmentedHost):
    """The same in segments."""

    def __init__(self) -> None:
        super().__init__()
        net = Net()
        self.topology = "feature_map"
        self.slot_config = SlotConfig.of_count(2)
        self.feature_shapes = ((4, 8, 8), (4, 8, 8))
        self.segments = nn.ModuleList(
            [
                net.stem,
                nn.Sequential(net.norm, nn.ReLU(), net.drop, net.body),
                nn.Sequential(net.second, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), net.head),
            ]
        )


def grown(host: str) -> MorphogeneticModel:
    """Two held seeds that matter, and statistics that moved in training."""
    torch.manual_seed(0)
    rules = LifecycleRules(min_training_epochs=0)
    if host == "wrapped":
        model = wrap(Net(), ["stem", "body"], sample=digits(2)[0], rules=rules)
    else:
        model = MorphogeneticModel(SegmentedNet(), rules)
    model.bind_optimiser(torch.optim.SGD(model.host.parameters(), lr=0.1))
    for slot in (0, 1):
        model.germinate(slot, BlueprintAction.CONV_LIGHT, Style.LINEAR_ADD)
        stir(model.slot(slot), rng_seed=slot, scale=1.0)
        set_stage(model, slot, Stage.HOLDING)
    model.train()
    for _ in range(5):
        model(digits(64)[0])
    return model


HOSTS = pytest.mark.parametrize("host", ["wrapped", "segmented"])


@HOSTS
def test_a_model_with_batch_norm_is_not_measured_with_statistics_of_another_network(host: str) -> None:
    with pytest.raises(EsperError, match=r"has 2 BatchNorm layers, .* pass training inputs as calibration"):
        measure(grown(host), *digits(20), (0, 1), CLASSIFICATION)


@HOSTS
def test_every_configuration_is_scored_with_its_own_statistics(host: str) -> None:
    model = grown(host)
    x, y = digits(60)
    inputs = digits(200, start=100)[0]
    result = measure(model, x, y, (0, 1), CLASSIFICATION, calibration=inputs)
    for configuration, loss in zip(result.configurations, result.losses, strict=True):
        alphas = [alpha if on else None for alpha, on in zip(model.live_alphas, configuration, strict=True)]
        by_hand = copy.deepcopy(model).eval()
        for layer in by_hand.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.train()
                layer.momentum = 1.0  # the last batch alone
        with torch.no_grad():
            by_hand(inputs, alphas)
            output = by_hand.eval()(x, alphas)
        assert loss == pytest.approx(CLASSIFICATION.loss(output, y).item(), rel=1e-4)


@HOSTS
def test_measuring_leaves_weights_statistics_mode_and_random_state_alone(host: str) -> None:
    model = grown(host)
    before, state, momenta = bits(model.state_dict()), torch.get_rng_state(), _momenta(model)
    measure(model, *digits(20), (0, 1), CLASSIFICATION, calibration=digits(50)[0])
    assert bits(model.state_dict()) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert _momenta(model) == momenta
    assert all(module.training for module in model.modules())
    measure(model.eval(), *digits(20), (0, 1), CLASSIFICATION, calibration=digits(50)[0])
    assert not any(module.training for module in model.modules())


def test_recalibration_stays_and_uses_no_more_inputs_than_it_needs() -> None:
    model = grown("wrapped")
    inputs = digits(CALIBRATION_SAMPLES + 100)[0]
    recalibrate(model, inputs)
    kept = bits(list(model.buffers()))
    recalibrate(model, inputs[:CALIBRATION_SAMPLES])
    assert bits(list(model.buffers())) == kept
    recalibrate(model, inputs[100:])
    assert bits(list(model.buffers())) != kept


def _momenta(model: nn.Module) -> list[float | None]:
    return [layer.momentum for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
