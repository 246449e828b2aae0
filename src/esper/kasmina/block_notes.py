"""Inserted blocks in the state dict of a network, for trainers that load weights before they call a callback.

A state dict has one entry more, which lists the slots with an inserted block. Loading it builds these blocks
and removes others.
"""

from __future__ import annotations

import json
from typing import Any, Final

import torch
from torch import Tensor, nn

from esper.kasmina.graft import BlockGraft
from esper.kasmina.seed_description import described, description_of
from esper.kasmina.slot import slots_of

NOTE: Final = "esper_blocks"
"""Key of the entry."""


def note_blocks(net: nn.Module) -> None:
    """Let state dicts of ``net`` list the inserted blocks, until its growth is finished."""
    net.register_state_dict_post_hook(_write)
    handle = net.register_load_state_dict_pre_hook(_build)
    # The blocks are built before the check that the state has as many blocks as the network.
    hooks: Any = net._load_state_dict_pre_hooks  # An OrderedDict.
    hooks.move_to_end(handle.id, last=False)


def weights_of(net: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the state dict without the list of inserted blocks."""
    return {name: value.clone() for name, value in net.state_dict().items() if name != NOTE}


def _write(net: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    blocks = {
        slot.site.name: [*described(slot.graft.description), float(slot.graft.alpha)]
        for slot in slots_of(net).values()
        if isinstance(slot.graft, BlockGraft)
    }
    state_dict[prefix + NOTE] = torch.tensor(list(json.dumps(blocks).encode()), dtype=torch.uint8)


def _build(net: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    found = state_dict.pop(prefix + NOTE, None)
    if found is None:
        return
    blocks = json.loads(bytes(found.tolist()))
    for slot in slots_of(net).values():
        if slot.site.name in blocks:
            blueprint, style, alpha = blocks[slot.site.name]
            slot.match(description_of(blueprint, style), None)
            slot.held.set_alpha(alpha)
        elif isinstance(slot.graft, BlockGraft):
            slot.match(None, None)
