"""The network with seeds switched on and off: what it answers in every configuration.

Every distinct prefix is computed once: at a slot that is to be switched, the features go on with and without
its seed. With batch normalisation every configuration has statistics of its own, and is run whole.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.kasmina.hosts.base import Host
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.slot import SeedSlot
from esper.tolaria.calibration import recalibrated

Prefix = tuple[bool, ...]
"""Which of the first few measured seeds are on; of all of them: a configuration."""

FEATURES_AT_ONCE = 2**19
"""Values that the features of one configuration may have: more do not stay in the cache."""
BATCHED_VALUES = 2**18
"""Values up to which the features of several configurations go on as one batch: fewer calls of small
layers. Beyond it a call costs nothing, and copies and memory that the system has to clear first do."""
ANSWERED_AT_ONCE = 2**15
"""Values of features that the last segment answers at once if they are not batched, or of outputs if they
are fewer: where there are many outputs per feature, they should not leave the cache either."""


class Answers(NamedTuple):
    """What the network says to some samples in one configuration."""

    row: int
    """Which configuration."""
    samples: slice
    output: Tensor


@torch.inference_mode()
def outputs_by_prefix(
    model: MorphogeneticModel, x: Tensor, slots: Sequence[int], configurations: NDArray[np.bool_]
) -> Iterator[Answers]:
    """All answers, a share of the samples at a time; configurations must be sorted."""
    host = model.host
    rows = [tuple(row) for row in configurations.tolist()]
    for share in _slices(0, len(x), samples_at_once(host)):
        features: dict[Prefix, Tensor] = {(): x[share]}
        for index, weight in enumerate(model.live_alphas):
            features = _through(host.segments[index], features)
            if weight is not None:
                slot = model.slot(index)
                slot.engage(weight)
                features = _branched(slot, features, rows) if index in slots else _through(slot, features)
        yield from _answers(host.segments[-1], features, share)


def _through(module: nn.Module, features: dict[Prefix, Tensor]) -> dict[Prefix, Tensor]:
    """``module`` of every prefix's features: small ones as one batch, large ones one by one."""
    if len(features) == 1 or not _are_small(features):
        return {prefix: module(h) for prefix, h in features.items()}
    outputs: Tensor = module(torch.cat(list(features.values())))
    return dict(zip(features, outputs.chunk(len(features)), strict=True))


def _are_small(features: dict[Prefix, Tensor]) -> bool:
    return sum(h.numel() for h in features.values()) <= BATCHED_VALUES


def _branched(slot: SeedSlot, off: dict[Prefix, Tensor], rows: list[Prefix]) -> dict[Prefix, Tensor]:
    """The features with this slot's seed off and on, as far as one of ``rows`` begins that way."""
    depth = len(next(iter(off))) + 1
    wanted = sorted({row[:depth] for row in rows})
    on = _through(slot, {prefix[:-1]: off[prefix[:-1]] for prefix in wanted if prefix[-1]})
    return {prefix: (on if prefix[-1] else off)[prefix[:-1]] for prefix in wanted}


def _answers(segment: nn.Module, features: dict[Prefix, Tensor], share: slice) -> Iterator[Answers]:
    """The last segment, of the features of all configurations in their order."""
    if _are_small(features):
        for row, output in enumerate(_through(segment, features).values()):
            yield Answers(row, share, output)
        return
    at_once = 0
    for row, h in enumerate(features.values()):
        at_once, first = max(1, at_once, ANSWERED_AT_ONCE // h[0].numel()), 0
        while first < len(h):
            output = segment(h[first : first + at_once])
            yield Answers(row, slice(share.start + first, share.start + first + len(output)), output)
            first += len(output)
            at_once = max(at_once, ANSWERED_AT_ONCE // output[0].numel())


def _slices(start: int, stop: int, step: int) -> Iterator[slice]:
    """``start`` to ``stop`` in pieces of ``step``."""
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def samples_at_once(host: Host) -> int:
    """How many samples go through the prefix tree together."""
    return max(1, FEATURES_AT_ONCE // max(map(math.prod, host.feature_shapes)))


@torch.no_grad()
def outputs_by_replay(
    model: MorphogeneticModel,
    x: Tensor,
    slots: Sequence[int],
    configurations: NDArray[np.bool_],
    calibration: Tensor | None = None,
) -> Iterator[Answers]:
    """All answers, by a plain forward for each configuration.

    With ``calibration`` inputs every configuration gets batch statistics of its own.
    """
    for row, configuration in enumerate(configurations):
        alphas = model.live_alphas
        for slot, on in zip(slots, configuration, strict=True):
            if not on:
                alphas[slot] = None
        with recalibrated(model, calibration, alphas):
            output = model(x, alphas)
        yield Answers(row, slice(0, len(x)), output)
