"""State dicts of the time before ``finish``, loaded into the finished network.

``finish`` changes names and shapes of weights. A hook of the finished network gives the names and shapes of
the finished network to a state dict that was kept during growth. The hook also holds the edits of the
network, for files.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.edit_list import EditLists, decoded, present_edits
from esper.kasmina.optimizer_groups import SEED_NAME
from esper.kasmina.optimizer_state import Enlarged, joined
from esper.kasmina.slot import slots_of, slots_with_blocks
from esper.kasmina.state_checks import NOTE, check_blocks, listed, seeds_in
from esper.leyline.errors import HostError

_REMEDY = "load a state of the time when the network had the same seeds, or read a file of growth.save"


@dataclass
class FinishedSeed:
    """Seed of a slot that ``finish`` has made plain."""

    label: str
    child: str = ""
    """Path of the graph that replaces the slot; empty if there is none."""
    names: tuple[str, ...] = ()
    """Names of the tensors in the graph, which are those of the graft."""
    merged: nn.Module | None = None
    """Seed whose linear map became part of the weights of its layer."""


class FinishedGrowth:
    """Hook of a finished network that loads state dicts of the time before ``finish``; holds the edits of the
    network.

    The pickle of a finished network must not need Esper, so an unpickled network has a function of Python in
    place of the hook that does nothing.

    Args:
        net: Network with slots, before it is finished.
    """

    def __init__(self, net: nn.Module) -> None:
        self.lists = edits_of(net)
        self._seeds = {path: FinishedSeed(slot.label) for path, slot in slots_of(net).items() if slot.label}
        earlier = finished_growth(net)
        self._containers: set[str] = {*slots_with_blocks(net), *(earlier._containers if earlier else ())}
        self._alphas: dict[str, tuple[str, float]] = dict(earlier._alphas) if earlier else {}
        """Names of the alphas of inserted blocks, with the path of the block and the value."""
        self._names: dict[Tensor, str] = {p: name for name, p in net.named_parameters()}
        self._names |= {buffer: name for name, buffer in net.named_buffers()}
        self._joins: list[tuple[str, str | None, str | None, int, int]] = []

    def __reduce__(self) -> Any:
        return getattr, ("", "format")

    def __deepcopy__(self, _memo: Any) -> FinishedGrowth:
        return self

    # --- recording ------------------------------------------------------------------------------

    def replaced(self, path: str, child: str, graph: nn.Module) -> None:
        """Record that the slot of the submodule ``path`` became the module ``graph`` with the name
        ``child``."""
        seed = self._seeds[path]
        seed.child, seed.names = f"{path}.{child}", tuple(graph.state_dict())

    def merged(self, path: str, seed: nn.Module) -> None:
        """Record that a linear seed became part of the layer ``path``."""
        self._seeds[path].merged = seed
        for edits in self.lists[-2:]:
            edits[:] = [edit for edit in edits if edit["block"] is not None or edit["site"]["path"] != path]

    def blended(self, block: str, child: str, alpha: float) -> None:
        """Record that the inserted block ``block`` got the hook ``child``, because its alpha is not 1."""
        self._alphas[f"{block}.{child}.alpha"] = (block, alpha)

    def register(self, net: nn.Module, enlarged: Iterable[Enlarged] = ()) -> None:
        """Record the enlarged parameters and register the hook in the finished network."""
        for each in enlarged:
            name = self._names[each.parameter] = self._names[each.old]
            new = None if each.new is None else self._names[each.new]
            alpha = None if each.alpha is None else self._names[each.alpha]
            self._joins.append((name, new, alpha, each.axis, each.added))
        self._names.clear()
        if any(self.lists) or self._seeds:
            net.register_load_state_dict_pre_hook(self)

    # --- loading --------------------------------------------------------------------------------

    def __call__(self, net: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Give a state dict of the time before ``finish`` the names and shapes of the finished network.

        Raises:
            HostError: The state dict has other seeds or blocks than the network; nothing was changed.
        """
        if slots_of(net):
            return  # The network grows again.
        note = state.pop(prefix + NOTE, None)
        check_blocks({path: net.get_submodule(path) for path in self._containers}, state, prefix, _REMEDY)
        lists = [] if note is None else decoded(note)
        alphas = {edit["block"]: edit["alpha"] for edits in lists for edit in edits}
        for name, (block, alpha) in self._alphas.items():
            state.setdefault(prefix + name, torch.tensor(alphas.get(block, alpha)))
        found, own = seeds_in(state, prefix), {path: seed.label for path, seed in self._seeds.items()}
        if not found:
            self._check_plain(net, state, prefix)
            return
        if found != own:
            raise HostError(f"the state has {listed(found)}, and this network has {listed(own)}; {_REMEDY}")
        for name, new, scale, axis, added in self._joins:
            value = None if new is None else state[prefix + new]
            if value is not None and scale is not None:
                value = state[prefix + scale] * value
            state[prefix + name] = joined(state[prefix + name], value, axis, added)
        for path, seed in self._seeds.items():
            self._translate(path, seed, state, prefix)

    def _check_plain(self, net: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Raise HostError if a state dict without seeds is of the time before a seed was planted."""
        graphs = {f"{seed.child}.{name}" for seed in self._seeds.values() for name in seed.names}
        tensors = net.state_dict()
        others = tensors.keys() - graphs - self._alphas.keys()
        lacks = graphs and not any(prefix + name in state for name in graphs)
        is_smaller = any(
            prefix + name in state and state[prefix + name].shape != tensors[name].shape
            for name, *_ in self._joins
        )
        if (lacks or is_smaller) and all(prefix + name in state for name in others):
            own = {path: seed.label for path, seed in self._seeds.items()}
            raise HostError(f"the state has no seed, and this network has {listed(own)}; {_REMEDY}")

    def _translate(self, path: str, seed: FinishedSeed, state: dict[str, Any], prefix: str) -> None:
        inside = f"{prefix}{path}.{SEED_NAME}.graft."
        own = {name[len(inside) :]: state.pop(name) for name in [*state] if name.startswith(inside)}
        if seed.child and "alpha" not in seed.names and own["alpha"] != 1.0:
            raise HostError(
                f"the state has {seed.label} in {path} at alpha {float(own['alpha']):g}, and this network was"
                f" finished at alpha 1; {_REMEDY}"
            )
        state |= {f"{prefix}{seed.child}.{name}": own[name] for name in seed.names if name in own}
        if seed.merged is not None:
            linear = copy.deepcopy(seed.merged)
            linear.load_state_dict(
                {name[len("seed.") :]: value for name, value in own.items() if name.startswith("seed.")}
            )
            for name in ("weight", "bias"):
                key = f"{prefix}{path}.{name}"
                if key in state:
                    state[key] = with_change(state[key], linear, own["alpha"]).to(state[key].dtype)


@torch.no_grad()
def with_change(parameter: Tensor, linear: nn.Module, alpha: Tensor) -> Tensor:
    """Return weight or bias of a layer with the linear map of a seed merged into it, in double precision."""
    seed, before = copy.deepcopy(linear).double(), parameter.double()
    change = seed(before.view(len(before), -1).T).T.reshape(before.shape)
    return before + alpha.double() * change


def finished_growth(net: nn.Module) -> FinishedGrowth | None:
    """Return the hook of a finished network; None if it has none."""
    hooks = (getattr(hook, "hook", hook) for hook in net._load_state_dict_pre_hooks.values())
    return next((hook for hook in hooks if isinstance(hook, FinishedGrowth)), None)


def edits_of(net: nn.Module) -> EditLists:
    """Return the edits of all growths of a network, of which the last may not be finished."""
    earlier = finished_growth(net)
    return [*([] if earlier is None else map(list, earlier.lists)), *present_edits(net)]
