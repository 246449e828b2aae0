"""Candidates of a race: blocks, hidden units and side modules that do not change the output at birth; and the
smallest limit of a race for given candidates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from esper.growth.race import LEAST_STEPS, MEASURING, PARTS, RACE, RACED_BLUEPRINTS, VALIDATION_SAMPLES
from esper.growth.race_runners import LEAST_PARTS, Blueprints, Candidate
from esper.kasmina.birth import captured_call, is_offered, zero_outputs
from esper.kasmina.blueprints import BlueprintSpec, blueprint_named
from esper.kasmina.compute import call_flops, count_part, count_units, forward_flops
from esper.kasmina.graft import BlockGraft, SideGraft
from esper.kasmina.sites import Site
from esper.kasmina.slot import check_compatible, place_in, slots_of, without_slots
from esper.kasmina.widening import WidthGraft
from esper.leyline import BlueprintError, Style
from esper.leyline.errors import IncompatibleSeedError

NOTHING_FITS: Final = "nothing was raced: every seed has too many parameters, or costs too much compute"
TOO_SHORT: Final = (
    "no race was run to its end: the training is too short for that; diagnose the network, and plan what to"
    " plant"
)


def candidates_at(
    host: nn.Module, host_flops: float, sites: Sequence[Site], blueprints: Blueprints, sample: Any
) -> list[Candidate]:
    """Return a candidate for every site of ``host`` and every blueprint that fits the site.

    Candidates do not change the output at birth. So a copied block is a candidate only if it becomes a block
    of the network and can start with zeroed output projections.

    Args:
        host: Frozen network.
        host_flops: FLOPs of the network's forward pass for one sample.
        sites: Sites of the network.
        blueprints: Names of blueprints by topology.
        sample: Input that the network is called with.
    """
    like = next((p for p in host.parameters() if p.is_floating_point()), torch.empty(0))
    found, pairs = [], set[tuple[str, ...]]()
    specs = [
        (site, blueprint_named(name, site.topology)) for site in sites for name in blueprints[site.topology]
    ]
    for site, spec in specs:
        if not (is_offered(spec, site) and _is_compatible(host, site, spec)):
            continue
        if spec.copies and site.insertion is not None:
            found += _block_at(host, host_flops, site, spec, sample)
        elif spec.widens and site.pair is not None and site.pair.first not in pairs:
            pairs.add(site.pair.first)  # Slots at a block and at a layer of it can have the same pair.
            found.append(_units_at(host, host_flops, site, spec))
        elif not (spec.copies or spec.widens):
            graft = SideGraft(site, spec, Style.LINEAR_ADD, None)
            flops = round(site.times * count_part(graft, site.shape[1:]).forward)
            found.append(Candidate(site, spec.name, graft.to(like), flops, flops / host_flops))
    return found


def _is_compatible(host: nn.Module, site: Site, spec: BlueprintSpec) -> bool:
    try:
        check_compatible(slots_of(host).values(), site, spec)
    except IncompatibleSeedError:
        return False
    return True


def _units_at(host: nn.Module, host_flops: float, site: Site, spec: BlueprintSpec) -> Candidate:
    """Return new hidden units in the pair of layers at ``site`` as a candidate."""
    layers = place_in(host, site).layers
    assert layers is not None
    graft = WidthGraft(site, spec, Style.LINEAR_ADD, layers)
    flops = count_units(graft).forward
    return Candidate(site, spec.name, graft, flops, flops / host_flops)


def _block_at(
    host: nn.Module, host_flops: float, site: Site, spec: BlueprintSpec, sample: Any
) -> list[Candidate]:
    """Return a copy of the block at ``site`` as a candidate; nothing if the copy cannot start without
    effect."""
    source = place_in(host, site).block
    graft = BlockGraft(site, spec, Style.LINEAR_ADD, without_slots(source).requires_grad_(True))
    called = captured_call(host, source, sample)
    try:
        zero_outputs(graft.seed, called, graft.argument, site.output.features)
    except BlueprintError:
        return []
    share = site.times * call_flops(graft.seed, called) / forward_flops(host, sample)
    return [Candidate(site, spec.name, graft, round(share * host_flops), share)]


# --- before the training ------------------------------------------------------------------------------------


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
