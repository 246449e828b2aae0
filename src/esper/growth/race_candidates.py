"""Candidates of a race: blocks, hidden units and side modules that do not change the output at birth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from esper.growth.race_runners import Blueprints, Candidate
from esper.kasmina.birth import captured_call, zero_outputs
from esper.kasmina.blueprints import BlueprintSpec, blueprint_named
from esper.kasmina.compute import call_flops, count_part, count_units, forward_flops
from esper.kasmina.graft import BlockGraft, SideGraft
from esper.kasmina.sites import Site
from esper.kasmina.slot import check_compatible, place_in, slots_of, without_slots
from esper.kasmina.widening import WidthGraft
from esper.leyline import BlueprintError, Style
from esper.leyline.errors import IncompatibleSeedError


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
        if not _is_compatible(host, site, spec):
            continue
        if spec.copies and site.insertion is not None:
            found += _block_at(host, host_flops, site, spec, sample)
        elif spec.widens and site.pair is not None and site.pair.first not in pairs:
            pairs.add(site.pair.first)  # Slots at a block and at a layer of it can have the same pair.
            found.append(_units_at(host, host_flops, site, spec))
        elif spec.fits(site.width, copyable=False, widenable=False):
            graft = SideGraft(site, spec, Style.LINEAR_ADD, None)
            flops = count_part(graft, site.shape[1:]).forward
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
    source = place_in(host, site).module
    graft = BlockGraft(site, spec, Style.LINEAR_ADD, without_slots(source).requires_grad_(True))
    called = captured_call(host, source, sample)
    try:
        zero_outputs(graft.seed, called, graft.argument, site.output.features)
    except BlueprintError:
        return []
    share = call_flops(graft.seed, called) / forward_flops(host, sample)
    return [Candidate(site, spec.name, graft, round(share * host_flops), share)]
