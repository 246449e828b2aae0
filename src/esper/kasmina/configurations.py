"""Outputs of a network with its seeds switched on and off.

In a built-in host, on/off configurations that agree up to a slot share the forward pass up to that slot. In
any other network, or if batch-normalisation statistics are recomputed, every on/off configuration runs a
whole forward pass.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina.dry_run import kept_statistics, recalibrate
from esper.kasmina.graft import SideGraft
from esper.kasmina.network import MorphogeneticModel

Prefix = tuple[bool, ...]
"""Beginning of an on/off configuration: the states of the first few measured seeds, in the order of the
forward pass."""

FEATURES_AT_ONCE = 2**19
"""Largest number of feature values per forward pass of one configuration; more would not stay in the
processor's cache."""
BATCHED_VALUES = 2**18
"""Largest number of feature values for which several on/off configurations run as one batch, to save calls of
small layers. With larger features, copying several configurations into one batch costs more time than it
saves."""
ANSWERED_AT_ONCE = 2**15
"""Largest number of values per call of the layers after the last slot, so that the outputs stay in the
processor's cache. Values of the features or of the outputs are counted, whichever are fewer. Configurations
that run as one batch have no such limit.
"""


class ConfigurationOutput(NamedTuple):
    """Output of the network in one on/off configuration of its seeds, for some of the samples."""

    row: int
    """Index of the on/off configuration, a row of the array ``configurations``."""
    samples: slice
    output: Tensor


@torch.inference_mode()
def outputs_by_prefix(
    model: MorphogeneticModel, x: Tensor, slots: Sequence[int], configurations: NDArray[np.bool_]
) -> Iterator[ConfigurationOutput]:
    """Yield the outputs of a built-in host for all on/off configurations, a slice of the samples at a time;
    ``configurations`` must be sorted."""
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
                    graft = model.slots[index].held
                    assert isinstance(graft, SideGraft), "a built-in host has side modules only"
                    features = _branched(graft.blended, features, rows)
            yield from _outputs(model.segments[-1], features, share)


def _through(module: Callable[[Tensor], Tensor], features: dict[Prefix, Tensor]) -> dict[Prefix, Tensor]:
    """Apply ``module`` to several feature tensors, one per prefix of on/off states: small tensors as one
    batch, large tensors one by one.
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
    """Return the features after a slot, with its seed off or on, for every prefix of on/off states that
    occurs in ``rows``.
    """
    depth = len(next(iter(off))) + 1
    wanted = sorted({row[:depth] for row in rows})
    on = _through(blended, {prefix[:-1]: off[prefix[:-1]] for prefix in wanted if prefix[-1]})
    return {prefix: (on if prefix[-1] else off)[prefix[:-1]] for prefix in wanted}


def _outputs(
    segment: Callable[[Tensor], Tensor], features: dict[Prefix, Tensor], share: slice
) -> Iterator[ConfigurationOutput]:
    """Yield the outputs of the layers after the last slot for all configurations, in the order of the
    configurations."""
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
    """Yield the outputs of any network for all on/off configurations, by one forward pass per configuration.

    If ``calibration`` inputs are given, the batch-normalisation statistics are recomputed from them for every
    configuration.
    """
    for row, configuration in enumerate(configurations):
        off = [slot for slot, on in zip(slots, configuration, strict=True) if not on]
        with model.taking_part(model.without(*off)), kept_statistics(model):
            if calibration is not None:
                recalibrate(model, calibration)
            yield ConfigurationOutput(row, slice(0, len(x)), model(x))
