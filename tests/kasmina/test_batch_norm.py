"""Every on/off configuration of seeds is scored with BatchNorm statistics of that configuration."""

import copy

import pytest
import torch
from torch import Tensor, nn

from esper import MorphogeneticModel
from esper.kasmina.dry_run import CALIBRATION_SAMPLES, recalibrate
from esper.leyline import BlueprintAction, Stage, Style
from esper.leyline.errors import EsperError
from esper.tolaria.tasks.spec import CLASSIFICATION
from tests.contracts.hosts import CLASSES, INPUT_SHAPE, BatchHost
from tests.tolaria.building import bits, measured_on, set_stage, stir


def inputs(count: int, rng_seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return ``count`` random images and labels."""
    generator = torch.Generator().manual_seed(rng_seed)
    x = torch.randn(count, *INPUT_SHAPE, generator=generator)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def grown() -> MorphogeneticModel:
    """Return a network with two seeds in stage HOLDING, trained BatchNorm statistics, and dropout."""
    torch.manual_seed(0)
    model = MorphogeneticModel(BatchHost(4))
    model.bind_optimiser(torch.optim.SGD(model.host.parameters(), lr=0.1))
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


def test_measuring_contributions_in_a_network_with_batch_norm_is_refused_without_calibration_inputs() -> None:
    with pytest.raises(EsperError, match=r"has 2 BatchNorm layers, .* pass training inputs as calibration"):
        measured_on(grown(), *inputs(20), (0, 1))


def test_batch_norm_statistics_are_recomputed_for_every_on_off_configuration_that_is_scored() -> None:
    model = grown()
    x, y = inputs(60)
    training = inputs(200, rng_seed=1)[0]
    result = measured_on(model, x, y, (0, 1), calibration=training)
    for configuration, loss in zip(result.configurations, result.losses, strict=True):
        off = [slot for slot, on in enumerate(configuration) if not on]
        expected = copy.deepcopy(model).eval()
        for layer in expected.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.train()
                # With momentum 1 the running statistics of BatchNorm are those of the last batch.
                layer.momentum = 1.0
        with torch.no_grad(), expected.taking_part(expected.without(*off)):
            expected(training)
            output = expected.eval()(x)
        assert loss == pytest.approx(CLASSIFICATION.loss(output, y).item(), rel=1e-4)
    assert len(set(result.losses.tolist())) == 4, "each configuration has another loss"


def test_measuring_contributions_leaves_weights_batch_norm_state_modes_and_random_state_unchanged() -> None:
    model = grown()
    before, state, momenta = bits(model.state_dict()), torch.get_rng_state(), _momenta(model)
    measured_on(model, *inputs(20), (0, 1), calibration=inputs(50)[0])
    assert bits(model.state_dict()) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert _momenta(model) == momenta
    assert all(module.training for module in model.modules())
    measured_on(model.eval(), *inputs(20), (0, 1), calibration=inputs(50)[0])
    assert not any(module.training for module in model.modules())


def test_recalibrate_computes_batch_norm_statistics_from_at_most_512_inputs() -> None:
    model = grown()
    training = inputs(CALIBRATION_SAMPLES + 100)[0]
    before = bits(list(model.buffers()))
    recalibrate(model, training)
    kept = bits(list(model.buffers()))
    assert kept != before
    recalibrate(model, training[:CALIBRATION_SAMPLES])
    assert bits(list(model.buffers())) == kept
    recalibrate(model, training[100:])
    assert bits(list(model.buffers())) != kept


def _momenta(model: nn.Module) -> list[float | None]:
    return [layer.momentum for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
