"""Running statistics of batch normalisation, recomputed for the network that is to be scored.

The running statistics of training do not fit a network with a seed switched off: without recomputation the
score would fall for that reason alone, and the contribution of the seed would be overestimated.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from esper.kasmina.dry_run import kept_buffers, kept_modes
from esper.kasmina.network import MorphogeneticModel
from esper.leyline.errors import EsperError

CALIBRATION_SAMPLES = 512


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the batch-normalisation layers with running statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


def check_calibration(model: nn.Module, inputs: Tensor | None) -> None:
    """Raise EsperError if the model has batch normalisation and there are no inputs to recompute its
    statistics.
    """
    if inputs is None and (found := batch_norms(model)):
        raise EsperError(
            f"the model has {len(found)} BatchNorm layers, whose statistics do not fit a network with a seed"
            " switched off; pass training inputs as calibration, to make them anew"
        )


@contextmanager
def fresh_statistics(model: nn.Module) -> Iterator[None]:
    """Replace all running statistics by the means over the batches that run inside the context; dropout is
    off.
    """
    layers = batch_norms(model)
    momenta = [layer.momentum for layer in layers]
    try:
        with kept_modes(model, training=False), torch.no_grad():
            for layer in layers:
                layer.reset_running_stats()
                # Momentum None makes the statistics a mean over all batches, not a moving average.
                layer.momentum = None
                layer.train()
            yield
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


def recalibrate(model: MorphogeneticModel, inputs: Tensor) -> None:
    """Replace all running statistics by those of ``inputs``."""
    if batch_norms(model):
        with fresh_statistics(model):
            model(inputs[:CALIBRATION_SAMPLES])


def kept_statistics(model: nn.Module) -> AbstractContextManager[None]:
    """Restore the running statistics on exit."""
    return kept_buffers(buffer for layer in batch_norms(model) for buffer in layer.buffers())
