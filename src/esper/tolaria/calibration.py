"""Statistics of batch normalisation, made anew for the network that is about to be scored.

Running statistics are those of the network that was trained, with its seeds on. With a seed switched
off they are wrong, the score falls for that reason alone, and the seed looks better than it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from esper.kasmina.model import Alphas, MorphogeneticModel
from esper.leyline.errors import EsperError

CALIBRATION_SAMPLES = 512


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """The layers whose running statistics a score depends on."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


def check_calibration(model: nn.Module, inputs: Tensor | None) -> None:
    """Raise if the model's scores would rest on statistics of another network."""
    if inputs is None and (found := batch_norms(model)):
        raise EsperError(
            f"the model has {len(found)} BatchNorm layers, whose statistics do not fit a network with a seed"
            " switched off; pass training inputs as calibration, to make them anew"
        )


@contextmanager
def fresh_statistics(model: nn.Module) -> Iterator[None]:
    """Batches that run inside replace all statistics by their means; nothing else draws or learns."""
    layers = batch_norms(model)
    modes = [(module, module.training) for module in model.modules()]
    momenta = [layer.momentum for layer in layers]
    model.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the mean of what comes, not a moving one
        layer.train()
    try:
        with torch.no_grad():
            yield
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        for module, mode in modes:
            module.training = mode


def recalibrate(model: MorphogeneticModel, inputs: Tensor, alphas: Alphas | None = None) -> None:
    """Replace all statistics by those of ``inputs`` under ``alphas``."""
    if batch_norms(model):
        with fresh_statistics(model):
            model(inputs[:CALIBRATION_SAMPLES], model.live_alphas if alphas is None else alphas)


@contextmanager
def kept_statistics(model: nn.Module) -> Iterator[None]:
    """The statistics come back as they were."""
    kept = [(buffer, buffer.clone()) for layer in batch_norms(model) for buffer in layer.buffers()]
    try:
        yield
    finally:
        for buffer, before in kept:
            buffer.copy_(before)


@contextmanager
def recalibrated(model: MorphogeneticModel, inputs: Tensor | None, alphas: Alphas) -> Iterator[None]:
    """``recalibrate`` for a while; the statistics of training come back. Without inputs, as it is."""
    with kept_statistics(model):
        if inputs is not None:
            recalibrate(model, inputs, alphas)
        yield
