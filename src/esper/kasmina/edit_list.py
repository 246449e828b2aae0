"""Edits of a network: its seeds as plain values, from which files build the same seeds in a new network.

The seeds of one growth are two lists of edits: first the inserted blocks, then all other seeds. Paths in the
second list are those in the network with the inserted blocks, so that the list also fits a network that its
configuration builds with these blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from esper.kasmina.edits import Insertion
from esper.kasmina.feature_output import Output
from esper.kasmina.graft import BlockGraft
from esper.kasmina.sites import Site
from esper.kasmina.slot import SeedSlot, slots_of
from esper.kasmina.widening import Pair, WidthGraft

Edit = dict[str, Any]
EditLists = list[list[Edit]]
IS_BUILT: Final = "is_built"
"""Key of an edit whose block the configuration of the network has built; only its alpha is missing."""


def present_edits(net: nn.Module) -> EditLists:
    """Return the edits of a growing network: inserted blocks, then all other seeds.

    Seeds that do not take part in the forward pass have alpha 0.
    """
    names = {module: path for path, module in net.named_modules()}
    filled = [slot for slot in slots_of(net).values() if slot.graft is not None]
    blocks = [_edit(slot, slot.site, names) for slot in filled if isinstance(slot.graft, BlockGraft)]
    others = [
        _edit(slot, _moved(slot, names), names) for slot in filled if not isinstance(slot.graft, BlockGraft)
    ]
    return [blocks, others]


def _edit(slot: SeedSlot, site: Site, names: Mapping[nn.Module, str]) -> Edit:
    graft = slot.held
    plain = asdict(replace(site, insertion=None, pair=None)) | {"refusal": None, "no_pair": None}
    return {
        "site": plain
        | {
            "output": list(site.output),
            "insertion": site.insertion and site.insertion.plain(),
            "pair": site.pair.plain() if site.pair is not None and isinstance(graft, WidthGraft) else None,
        },
        "seed": json.loads(bytes(graft.description.tolist())),
        "alpha": float(graft.alpha) if graft.participation.active else 0.0,
        "block": names[graft.seed] if isinstance(graft, BlockGraft) else None,
    }


def _moved(slot: SeedSlot, names: Mapping[nn.Module, str]) -> Site:
    """Return the site of a slot with the present paths of its modules."""
    layers, pair = slot.place.layers, slot.site.pair
    if layers is not None and pair is not None:
        first = tuple(names[each] for each in layers.first)
        norm = None if layers.norm is None else names[layers.norm]
        pair = pair._replace(first=first, norm=norm, second=names[layers.second], between=())
        if layers.shared is not None and pair.setting is not None:
            pair = pair._replace(setting=pair.setting._replace(container=names[layers.shared.blocks]))
    block = names[slot.block[0]] if slot.block else None
    return replace(slot.site, path=names[slot.place.module], block=block, insertion=None, pair=pair)


def description_in(edit: Edit) -> Tensor:
    """Return the description of the seed of an edit."""
    return _bytes(edit["seed"])


def match_edit(slot: SeedSlot, edit: Edit | None, net: nn.Module) -> None:
    """Let a slot of ``net`` hold the seed of an edit, with arbitrary weights; empty it if the edit is
    None."""
    like = next(slot.place.module.parameters(), next(net.parameters(), torch.empty(0)))
    slot.match(None if edit is None else description_in(edit), like)
    if edit is not None:
        slot.held.set_alpha(edit["alpha"])


def site_of(edit: Edit) -> Site:
    """Return the site of an edit."""
    entry = edit["site"]
    parts = {
        "output": Output(*entry["output"]),
        "shape": tuple(entry["shape"]),
        "swap": entry["swap"] and tuple(entry["swap"]),
        "mask": entry["mask"] and tuple(entry["mask"]),
        "insertion": entry["insertion"] and Insertion.of(entry["insertion"]),
        "pair": entry["pair"] and Pair.of(entry["pair"]),
    }
    return Site(**entry | parts)


def check_edits(lists: EditLists) -> None:
    """Raise an exception of any class unless ``lists`` are lists of edits."""
    for edit in (edit for edits in lists for edit in edits):
        site_of(edit), description_in(edit), float(edit["alpha"]), edit["block"]


def beyond_configuration(lists: EditLists) -> EditLists:
    """Return the edits that the configuration of a model of transformers does not describe: side modules, new
    hidden units without an attribute for their number, and alphas of blocks below 1."""
    return [[own for edit in edits for own in _beyond_configuration(edit)] for edits in lists]


def _beyond_configuration(edit: Edit) -> list[Edit]:
    site = site_of(edit)
    if edit["block"] is not None:
        is_counted = site.insertion is not None and any(each.is_in_config for each in site.insertion.counts)
        return [edit] if not is_counted else [] if edit["alpha"] == 1.0 else [{**edit, IS_BUILT: True}]
    is_stated = site.pair is not None and site.pair.setting is not None
    return [] if is_stated else [edit]


def encoded(lists: EditLists) -> Tensor:
    """Return edits as a tensor of bytes, because file formats for weights store tensors only."""
    return _bytes(lists)


def _bytes(values: Any) -> Tensor:
    return torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)


def decoded(content: Tensor) -> EditLists:
    """Return the edits that a tensor of ``encoded`` contains."""
    lists: EditLists = json.loads(bytes(content.tolist()))
    return lists
