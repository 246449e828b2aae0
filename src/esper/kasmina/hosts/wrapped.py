"""Any ``nn.Module`` as a host: slots on named submodules, by forward hooks.

The hooks are bound methods of the slots and are attached once, when the module is wrapped:
closures would break deepcopy and pickling, and hooks added after ``torch.compile`` are ignored.
A probe forward finds the features at every slot and the order in which the forward meets them.
"""

import fnmatch
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import Topology
from esper.kasmina.hosts.base import Host
from esper.kasmina.slot import SeedSlot
from esper.kasmina.streams import TorchStream
from esper.leyline.errors import HostError, UnknownNameError
from esper.leyline.slot_config import SlotConfig

_RANK = {"feature_map": 4, "tokens": 3, "features": 2}

_SHAPE = {
    "feature_map": "[batch, channels, height, width]",
    "tokens": "[batch, tokens, width]",
    "features": "[batch, width]",
}


class WrappedHost(Host):
    """A user's module, unchanged, with slots after some of its submodules."""

    segmented = False

    def __init__(
        self, module: nn.Module, slots: Sequence[str], sample: Tensor, topology: Topology = "feature_map"
    ) -> None:
        """``slots`` are submodule names or patterns such as ``layer?.0``; ``sample`` is an input batch."""
        super().__init__()
        matched = _match(module, slots)
        seen = _probe(module, matched, sample)
        for name in matched:
            _check_slot(name, seen.get(name, []), topology, module)
        ordered = sorted(matched, key=lambda name: list(seen).index(name))
        self.module = module
        self.topology = topology
        self.submodule_names = tuple(ordered)
        self.slot_config = SlotConfig.of_count(len(ordered))
        self.feature_shapes = tuple(tuple(seen[name][0].shape[1:]) for name in ordered)

    def attach(self, slots: Sequence[SeedSlot]) -> None:
        # Kept, because only unpickled handles reserve their hooks' numbers: without them the next hook
        # registered in a new process would take a slot's place.
        self.handles = [
            self.module.get_submodule(name).register_forward_hook(slot.on_forward)
            for name, slot in zip(self.submodule_names, slots, strict=True)
        ]

    def forward(self, x: Tensor, slots: Sequence[SeedSlot], start: int | None = None) -> Tensor:
        """The hooks apply the slots; ``start`` changes nothing, the whole forward is replayed."""
        return self.module(x)


def _match(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    names = [name for name, _ in module.named_modules() if name]
    matched: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        hits = fnmatch.filter(names, pattern)
        if not hits:
            raise UnknownNameError(
                f"submodule of {type(module).__name__} for a slot",
                pattern,
                names,
                "Patterns such as layer?.0 work too.",
            )
        matched += [name for name in hits if name not in matched]
    if not matched:
        raise HostError(
            f"no slot was named; the submodules of {type(module).__name__} are {', '.join(names)}"
        )
    return matched


def _probe(module: nn.Module, names: Sequence[str], sample: Tensor) -> dict[str, list[Any]]:
    """What each named submodule returns in one forward, in order of first call.

    Buffers and random state are put back: looking must not change the host.
    """
    seen: dict[str, list[Any]] = {}
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    handles = []
    for name in names:

        def look(_m: nn.Module, _a: Any, output: Any, name: str = name) -> None:
            seen.setdefault(name, []).append(output)

        handles.append(module.get_submodule(name).register_forward_hook(look))
    try:
        with torch.no_grad(), TorchStream(0):
            module(sample)
    finally:
        for handle in handles:
            handle.remove()
        for buffer, before in buffers:
            buffer.copy_(before)
    return seen


def _check_slot(name: str, outputs: Sequence[Any], topology: Topology, module: nn.Module) -> None:
    kind = type(module.get_submodule(name)).__name__
    if len(outputs) != 1:
        raise HostError(
            f"submodule '{name}' ({kind}) runs {len(outputs)} times in one forward; a slot needs a"
            " submodule that runs exactly once"
        )
    output = outputs[0]
    wanted = _SHAPE[topology]
    if not isinstance(output, Tensor):
        raise HostError(
            f"submodule '{name}' ({kind}) returns {type(output).__name__}; a slot needs one tensor {wanted}"
        )
    if output.ndim != _RANK[topology] or not output.is_floating_point():
        raise HostError(
            f"submodule '{name}' ({kind}) returns {output.dtype} of shape {tuple(output.shape)}, which is no"
            f" {topology}; a slot needs floats {wanted}"
        )
