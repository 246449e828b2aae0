"""Forecast of the first heat of a race inside ``esper.grow``, before the training begins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from esper.growth.race import LEAST_STEPS, MEASURING, PARTS, RACE, RACED_BLUEPRINTS, VALIDATION_SAMPLES
from esper.growth.race_candidates import candidates_at
from esper.growth.race_runners import LEAST_PARTS
from esper.kasmina.sites import Site

NOTHING_FITS: Final = "nothing was raced: every seed has too many parameters, or costs too much compute"
TOO_SHORT: Final = (
    "no race was run to its end: the training is too short for that; diagnose the network, and plan what to"
    " plant"
)


def candidate_sizes(
    net: nn.Module, host_flops: float, sites: Sequence[Site], sample: Any
) -> list[tuple[int, int]]:
    """Return parameters and forward FLOPs of every candidate of a race; draw no random numbers."""
    with torch.random.fork_rng():
        found = candidates_at(net, host_flops, sites, RACED_BLUEPRINTS, sample)
    return [(each.parameters, each.flops) for each in found]


def least_race_flops(
    seeds: Sequence[int], host: float, batch_size: int, held_out: int, limit: float
) -> float:
    """Return the smallest limit in FLOPs with which the first heat of a race can be run, with one candidate.

    Args:
        seeds: Forward FLOPs of the candidates for one sample.
        host: Forward FLOPs of the network for one sample.
        batch_size: Number of samples in a minibatch.
        held_out: Number of validation samples.
        limit: Expected limit of the race, on which the number of samples measured depends.
    """
    heat = RACE.heats[0]
    cheapest = min(seeds)
    most = min(held_out, VALIDATION_SAMPLES)
    measured = max(min(MEASURING * limit / host, most), most * LEAST_PARTS / PARTS)
    training = LEAST_STEPS * batch_size * (2 * host + 3 * cheapest + 3 * host)
    measuring = measured * (cheapest + 2 * host)
    return math.ceil((training + measuring) / heat.share)
