"""Conversion of new hidden units into units of the network's own layers.

The weights of the units are appended to the weights of the layers. A layer gets new ``Parameter`` objects,
because autograd does not allow another shape for a parameter of which an earlier loss is still referenced.
The caller replaces the parameters in the optimisers, with the returned ``Enlarged`` values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.optimizer_state import Enlarged, joined
from esper.kasmina.slot import RESERVED, slots_of
from esper.kasmina.transaction import names_width
from esper.kasmina.widening import PairLayers, SharedSize, WidthGraft


@dataclass
class PermanentUnits:
    """Result of making new hidden units permanent."""

    slot: str
    """Name of the last slot that had new hidden units, for error messages."""
    enlarged: list[Enlarged]
    sizes: list[SharedSize]

    @torch.no_grad()
    def equalise(self) -> bool:
        """Append units with zero weights to blocks that must have as many hidden units as the widened blocks,
        and change their configuration; return whether there are such blocks."""
        for size in self.sizes:
            self.enlarged += _equalise(size)
        return bool(self.sizes)


@torch.no_grad()
def make_units_permanent(net: nn.Module) -> PermanentUnits:
    """Append all new hidden units to the layers of the network, and remove their slots and hooks."""
    permanent = PermanentUnits("", [], [])
    sizes: dict[tuple[int, str], SharedSize] = {}
    for path, slot in slots_of(net).items():
        graft, layers = slot.graft, slot.place.layers
        if not isinstance(graft, WidthGraft) or layers is None:
            continue
        permanent.slot = slot.site.name
        slot.remove()
        del net.get_submodule(path)._modules[RESERVED]
        permanent.enlarged += _append_units(layers, graft)
        if layers.shared is not None:
            sizes[id(layers.shared.blocks), layers.shared.names.second] = layers.shared
    permanent.sizes = list(sizes.values())
    return permanent


def _append_units(layers: PairLayers, graft: WidthGraft) -> Iterator[Enlarged]:
    """Append the weights of new hidden units to the parameters and statistics of a pair of layers."""
    for layer, new in zip(layers.first, graft.seed.inner, strict=True):
        yield from _append_rows(layer, dict(new.named_parameters()), graft.count)
    if layers.norm is not None and graft.seed.norm is not None:
        yield from _append_rows(layers.norm, dict(graft.seed.norm.named_parameters()), graft.count)
        yield from _append_statistics(layers.norm, graft.seed.norm, graft.count)
    outgoing = graft.seed.outer.get_parameter("weight")
    yield _append(layers.second, "weight", outgoing, 1, graft.count, graft.alpha)
    _state_sizes(layers)


def _append_rows(layer: nn.Module, new: dict[str, nn.Parameter], count: int) -> Iterator[Enlarged]:
    for name, _ in list(layer.named_parameters(recurse=False)):
        yield _append(layer, name, new.get(name), 0, count)


def _append_statistics(norm: nn.Module, new: nn.Module, count: int) -> Iterator[Enlarged]:
    for name in ("running_mean", "running_var"):
        old, added = getattr(norm, name), getattr(new, name)
        if old is not None:
            setattr(norm, name, joined(old, added, 0, count))
            yield Enlarged(old, getattr(norm, name), added, 0, count)


def _state_sizes(layers: PairLayers) -> None:
    """Set the attributes in which layers state their sizes."""
    second: Any = layers.second
    for module in layers.modules():
        for name in ("out_features", "out_channels", "num_features"):
            if module is not second and hasattr(module, name):
                setattr(module, name, layers.hidden)
    setattr(second, "in_features" if hasattr(second, "in_features") else "in_channels", layers.hidden)


def _append(
    layer: nn.Module, name: str, new: nn.Parameter | None, axis: int, count: int, alpha: Tensor | None = None
) -> Enlarged:
    """Append ``count`` rows or columns to a parameter of a layer: the values of ``new`` times ``alpha``, or
    zeros."""
    old = layer.get_parameter(name)
    scaled = new if new is None or alpha is None else alpha * new
    values = joined(old, scaled, axis, count)
    is_channels_last = values.ndim == 4 and not old.is_contiguous()
    memory = torch.channels_last if is_channels_last else torch.contiguous_format
    parameter = nn.Parameter(values.contiguous(memory_format=memory), requires_grad=old.requires_grad)
    vars(parameter).update(vars(old))
    setattr(layer, name, parameter)
    return Enlarged(old, parameter, new, axis, count, alpha)


# --- blocks that must have the same size --------------------------------------------------------------------


def _equalise(size: SharedSize) -> Iterator[Enlarged]:
    """Append units with zero weights to all blocks with fewer hidden units than the widest block, and state
    the new number in the configuration."""
    pairs = [PairLayers.of(block, size.names) for block in size.blocks]
    hidden = max(layers.hidden for layers in pairs)
    for block, layers in zip(size.blocks, pairs, strict=True):
        count = hidden - layers.hidden
        if count:
            yield from _append_zeros(layers, count)
        for module in block.modules():
            for name, value in vars(module).items():
                if names_width(name) and type(value) is int and value == size.before:
                    setattr(module, name, hidden)
    setattr(size.config, size.attribute, hidden)


def _append_zeros(layers: PairLayers, count: int) -> Iterator[Enlarged]:
    for layer in layers.first:
        yield from _append_rows(layer, {}, count)
    yield _append(layers.second, "weight", None, 1, count)
    _state_sizes(layers)
