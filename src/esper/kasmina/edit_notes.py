"""Edits in the state dict of a network, for trainers that load weights before they call a callback.

The state dict of a network with seeds has one entry more, which contains the edits of the network. Loading it
builds the seeds that the network lacks and removes others.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from esper.kasmina.edit_list import decoded, encoded, match_edit, present_edits
from esper.kasmina.older_states import edits_of
from esper.kasmina.slot import is_complete, slots_of
from esper.kasmina.state_checks import NOTE
from esper.leyline.errors import GrowthWarning


def note_edits(net: nn.Module) -> None:
    """Let state dicts of ``net`` contain the edits, until its growth is finished."""
    net.register_state_dict_post_hook(_write)
    handle = net.register_load_state_dict_pre_hook(_build)
    # Seeds are built before the check that the state has the seeds of the network.
    hooks: Any = net._load_state_dict_pre_hooks  # An OrderedDict.
    hooks.move_to_end(handle.id, last=False)


def weights_of(net: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the state dict without the edits."""
    return {name: value.clone() for name, value in net.state_dict().items() if name != NOTE}


def _write(net: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    if any(present_edits(net)):
        state_dict[prefix + NOTE] = encoded(edits_of(net))


def _build(net: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    found = state_dict.pop(prefix + NOTE, None)
    if found is None and not is_complete(net, state_dict, prefix):
        return
    lists = [] if found is None else decoded(found)[-2:]
    wanted = {edit["site"]["name"]: edit for edits in lists for edit in edits}
    for slot in slots_of(net).values():
        edit = wanted.get(slot.site.name)
        if edit is None and slot.label:
            GrowthWarning.issue(
                f"the state that was loaded has no seed in slot {slot.site.name}; its own was removed"
            )
        match_edit(slot, edit, net)
