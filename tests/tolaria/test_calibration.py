"""Batch statistics that fit the network which is scored."""

import copy

import pytest
import torch
from torch import Tensor, nn

from esper import MorphogeneticModel
from esper.kasmina.batch_norm import CALIBRATION_SAMPLES, recalibrate
from esper.kasmina.contributions import measure
from esper.leyline import BlueprintAction, Stage, Style
from esper.leyline.errors import EsperError
from esper.tolaria.objective import CLASSIFICATION
from tests.contracts.hosts import CLASSES, INPUT_SHAPE
from tests.contracts.matrix import begin
from tests.tolaria.building import bits, set_stage, stir


def inputs(count: int, rng_seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rng_seed)
    x = torch.randn(count, *INPUT_SHAPE, generator=generator)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def grown() -> MorphogeneticModel:
    """Two held seeds that matter, and statistics that moved in training; dropout must stay silent."""
    model = begin("images_batch", 4).model
    for slot in (0, 1):
        model.germinate(slot, BlueprintAction.CONV_LIGHT, Style.LINEAR_ADD)
        stir(model.slot(slot), rng_seed=slot, scale=1.0)
        set_stage(model, slot, Stage.HOLDING)
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    norms[-1].momentum = 0.3
    model.train()
    for _ in range(5):
        model(inputs(64)[0])
    return model


def test_a_model_with_batch_norm_is_not_measured_with_statistics_of_another_network() -> None:
    with pytest.raises(EsperError, match=r"has 2 BatchNorm layers, .* pass training inputs as calibration"):
        measure(grown(), *inputs(20), (0, 1), CLASSIFICATION)


def test_every_configuration_is_scored_with_its_own_statistics() -> None:
    model = grown()
    x, y = inputs(60)
    training = inputs(200, rng_seed=1)[0]
    result = measure(model, x, y, (0, 1), CLASSIFICATION, calibration=training)
    for configuration, loss in zip(result.configurations, result.losses, strict=True):
        alphas = [alpha if on else None for alpha, on in zip(model.live_alphas, configuration, strict=True)]
        by_hand = copy.deepcopy(model).eval()
        for layer in by_hand.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.train()
                layer.momentum = 1.0  # the last batch alone
        with torch.no_grad():
            by_hand(training, alphas)
            output = by_hand.eval()(x, alphas)
        assert loss == pytest.approx(CLASSIFICATION.loss(output, y).item(), rel=1e-4)


def test_measuring_leaves_weights_statistics_mode_and_random_state_alone() -> None:
    model = grown()
    before, state, momenta = bits(model.state_dict()), torch.get_rng_state(), _momenta(model)
    measure(model, *inputs(20), (0, 1), CLASSIFICATION, calibration=inputs(50)[0])
    assert bits(model.state_dict()) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert _momenta(model) == momenta
    assert all(module.training for module in model.modules())
    measure(model.eval(), *inputs(20), (0, 1), CLASSIFICATION, calibration=inputs(50)[0])
    assert not any(module.training for module in model.modules())


def test_recalibration_stays_and_uses_no_more_inputs_than_it_needs() -> None:
    model = grown()
    training = inputs(CALIBRATION_SAMPLES + 100)[0]
    recalibrate(model, training)
    kept = bits(list(model.buffers()))
    recalibrate(model, training[:CALIBRATION_SAMPLES])
    assert bits(list(model.buffers())) == kept
    recalibrate(model, training[100:])
    assert bits(list(model.buffers())) != kept


def _momenta(model: nn.Module) -> list[float | None]:
    return [layer.momentum for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
