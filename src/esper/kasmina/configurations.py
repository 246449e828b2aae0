"""Outputs of a network with its seeds switched on and off.

In a segmented host every distinct prefix is computed once: at a slot that is switched, the features continue
with and without its seed. Other networks, and networks with batch normalisation, whose statistics differ by
configuration, repeat the whole forward pass.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina.batch_norm import kept_statistics, recalibrate
from esper.kasmina.network import MorphogeneticModel

Prefix = tuple[bool, ...]
"""On/off state of the first few measured seeds; a configuration is the on/off state of all measured seeds."""

FEATURES_AT_ONCE = 2**19
"""Largest number of feature values per configuration; more values would not stay in the processor's cache."""
BATCHED_VALUES = 2**18
"""Number of feature values up to which several configurations run as one batch, which saves calls of small
layers. For larger features the calls cost little, and the copies into one batch cost more."""
ANSWERED_AT_ONCE = 2**15
"""Number of feature values, or of output values if there are fewer, that the last segment handles in one call
if configurations are not batched; the limit keeps the outputs in the processor's cache.
"""


class ConfigurationOutput(NamedTuple):
    """Output of one configuration for some samples."""

    row: int
    """Index of the on/off configuration."""
    samples: slice
    output: Tensor


@torch.inference_mode()
def outputs_by_prefix(
    model: MorphogeneticModel, x: Tensor, slots: Sequence[int], configurations: NDArray[np.bool_]
) -> Iterator[ConfigurationOutput]:
    """Yield the outputs of a segmented host, a share of the samples at a time; configurations are sorted."""
    assert model.segments is not None
    rows = [tuple(row) for row in configurations.tolist()]
    at_once = max(1, FEATURES_AT_ONCE // max(math.prod(site.shape[1:]) for site in model.sites))
    with model.taking_part(model.without(*slots)):
        for first in range(0, len(x), at_once):
            share = slice(first, min(first + at_once, len(x)))
            features: dict[Prefix, Tensor] = {(): x[share]}
            for index, segment in enumerate(model.segments[:-1]):
                features = _through(segment, features)
                if index in slots:
                    features = _branched(model.slots[index].held.blended, features, rows)
            yield from _outputs(model.segments[-1], features, share)


def _through(module: Callable[[Tensor], Tensor], features: dict[Prefix, Tensor]) -> dict[Prefix, Tensor]:
    """Apply ``module`` to the features of every prefix: small features as one batch, large features one by
    one.
    """
    if len(features) == 1 or not _are_small(features):
        return {prefix: module(h) for prefix, h in features.items()}
    outputs: Tensor = module(torch.cat(list(features.values())))
    return dict(zip(features, outputs.chunk(len(features)), strict=True))


def _are_small(features: dict[Prefix, Tensor]) -> bool:
    return sum(h.numel() for h in features.values()) <= BATCHED_VALUES


def _branched(
    blended: Callable[[Tensor], Tensor], off: dict[Prefix, Tensor], rows: list[Prefix]
) -> dict[Prefix, Tensor]:
    """Return the features with a seed switched off and on, for every prefix of the configurations
    ``rows``.
    """
    depth = len(next(iter(off))) + 1
    wanted = sorted({row[:depth] for row in rows})
    on = _through(blended, {prefix[:-1]: off[prefix[:-1]] for prefix in wanted if prefix[-1]})
    return {prefix: (on if prefix[-1] else off)[prefix[:-1]] for prefix in wanted}


def _outputs(
    segment: Callable[[Tensor], Tensor], features: dict[Prefix, Tensor], share: slice
) -> Iterator[ConfigurationOutput]:
    """Run the last segment on the features of all configurations, in their order."""
    if _are_small(features):
        for row, output in enumerate(_through(segment, features).values()):
            yield ConfigurationOutput(row, share, output)
        return
    at_once = 0
    for row, h in enumerate(features.values()):
        at_once, first = max(1, at_once, ANSWERED_AT_ONCE // h[0].numel()), 0
        while first < len(h):
            output = segment(h[first : first + at_once])
            yield ConfigurationOutput(
                row, slice(share.start + first, share.start + first + len(output)), output
            )
            first += len(output)
            at_once = max(at_once, ANSWERED_AT_ONCE // output[0].numel())


@torch.no_grad()
def outputs_by_replay(
    model: MorphogeneticModel,
    x: Tensor,
    slots: Sequence[int],
    configurations: NDArray[np.bool_],
    calibration: Tensor | None = None,
) -> Iterator[ConfigurationOutput]:
    """Yield the outputs of any network by one forward pass per configuration.

    With ``calibration`` inputs the batch-normalisation statistics are recomputed for every configuration.
    """
    for row, configuration in enumerate(configurations):
        off = [slot for slot, on in zip(slots, configuration, strict=True) if not on]
        with model.taking_part(model.without(*off)), kept_statistics(model):
            if calibration is not None:
                recalibrate(model, calibration)
            yield ConfigurationOutput(row, slice(0, len(x)), model(x))
