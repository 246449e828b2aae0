"""A seed that stays, in one call: what a diagnosis is followed up with."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from esper.growth import finishing
from esper.growth.sites import find_sites
from esper.growth.slot import attach, detach
from esper.growth.surroundings import unwrapped
from esper.leyline.errors import HostError

SAMPLES: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""What each network was called with when it was last diagnosed."""


def add(net: nn.Module, place: str, blueprint: str, *, sample: Any = None) -> nn.Module:
    """Plant a seed behind the submodule ``place``, for good; returns ``net``, ready to be trained.

    It stays a plain module of its class, and until it is trained it computes what it did, since the seed
    starts at zero. Make the optimiser afterwards, or hand it the new parameters. ``sample`` is what it is
    called with; after a diagnosis of this network that is known.
    """
    own = unwrapped(net)
    sample = SAMPLES.get(own) if sample is None else sample
    if sample is None:
        raise HostError(
            f"this {type(own).__name__} has not been diagnosed here; pass sample=, a batch of its inputs"
        )
    found = find_sites(own, place, sample)
    if len(found) != 1:
        names = ", ".join(site.name for site in found)
        raise HostError(f"place {place!r} names {len(found)} submodules ({names}); add() plants behind one")
    [slot] = attach(own, found, sample)
    like = next((p for p in own.parameters() if p.is_floating_point()), torch.empty(0))
    try:
        slot.germinate(own.get_submodule(slot.site.path), blueprint, like=like).requires_grad_(True)
        finishing.finish(own, sample, merge=False, leave=lambda _: None)
    except BaseException:  # Ctrl-C too leaves nothing half done
        detach(own)
        raise
    return net
