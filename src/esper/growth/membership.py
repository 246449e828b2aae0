"""Seeds in the user's own optimiser: they join the group that trains their place, and leave without a trace.

A parameter is appended to the ``params`` of an existing group. So learning rate, scheduler, scaler,
accumulation and clipping hold for it by themselves; a new group would break or rescale common schedulers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Final

from torch import nn
from torch.optim import LBFGS, Optimizer

from esper.leyline.errors import HostError

_SHARDED: Final = ("ZeroRedundancyOptimizer", "DeepSpeedZeroOptimizer", "_NamedOptimizer")
_MATRICES_ONLY: Final = "muon"
"""Part of the name of optimisers that step only on matrices."""
_RATES: Final = ("lr", "initial_lr")

Group = dict[str, Any]


class Membership:
    """Which group of the user's optimisers every parameter of the network is in."""

    def __init__(self, optimizer: Any, net: nn.Module) -> None:
        """``optimizer`` is one, a wrapper with ``.optimizer``, several, or None while there is none yet."""
        several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        self.optimisers = [_unwrapped(each) for each in several if each is not None]
        self._net = net
        if self.optimisers:
            _check_trainable(net, self.optimisers)

    @property
    def _groups(self) -> list[tuple[Optimizer, Group]]:
        return [(optimiser, group) for optimiser in self.optimisers for group in optimiser.param_groups]

    def join(self, new: Iterable[nn.Parameter], near: Sequence[Sequence[nn.Parameter]]) -> None:
        """Take ``new`` into groups; ``near`` are the host's parameters by distance, the slot's own first.

        A group in the order of the network stays in it: an optimiser made anew from the grown network has the
        same order, and a saved state fits it.
        """
        if not self.optimisers:
            return
        held = {id(p) for _, group in self._groups for p in group["params"]}
        chosen = [(p, self._group_for(p, near)) for p in new if id(p) not in held]
        place = {id(p): number for number, p in enumerate(self._net.parameters())}
        for parameter, group in chosen:
            places = [place.get(id(p), -1) for p in group["params"]]
            later = [i for i, p in enumerate(places) if p > place[id(parameter)]]
            in_order = places == sorted(places) and -1 not in places
            group["params"].insert(later[0] if later and in_order else len(places), parameter)

    def leave(self, old: Iterable[nn.Parameter]) -> None:
        """Take parameters out of lists and state."""
        gone = {id(parameter): parameter for parameter in old}
        for optimiser, group in self._groups:
            group["params"][:] = [p for p in group["params"] if id(p) not in gone]
            for parameter in gone.values():
                optimiser.state.pop(parameter, None)

    def copy_moments(self, old: Iterable[nn.Parameter], new: Iterable[nn.Parameter]) -> None:
        """Give ``new`` what the optimisers have gathered for ``old``, where both are in one."""
        for theirs, ours in zip(old, new, strict=True):
            source, target = self._optimiser_of(theirs), self._optimiser_of(ours)
            if source is not None and source is target and theirs in source.state:
                state = source.state[theirs]
                source.state[ours] = {k: v.clone() if hasattr(v, "clone") else v for k, v in state.items()}

    def _optimiser_of(self, parameter: nn.Parameter) -> Optimizer | None:
        return next((o for o, group in self._groups if any(p is parameter for p in group["params"])), None)

    def _group_for(self, parameter: nn.Parameter, near: Sequence[Sequence[nn.Parameter]]) -> Group:
        """The group of the nearest layer, and there of its parameters of the same kind (matrix or vector).

        Weight decay is often kept from vectors by a group of their own, and some optimisers take matrices
        only.
        """
        group_of = {id(p): (o, group) for o, group in self._groups for p in group["params"]}
        held = [[p for p in layer if id(p) in group_of] for layer in near]
        held = [layer for layer in held if layer]
        if not held and not any(p.requires_grad for layer in near for p in layer):
            return self._groups[0][1]  # the host is frozen, and this optimiser was made for seeds alone
        if not held:
            raise HostError("no group of the optimiser holds a parameter of the network any more")
        optimiser, owner = group_of[id(held[0][0])]
        same = [p for p in held[0] if _kind(p) == _kind(parameter)]
        if same:
            return group_of[id(same[0])][1]
        if any(_kind(p) == _kind(parameter) for p in owner["params"]):
            return owner
        for layer in held:
            for other in layer:
                if _kind(other) == _kind(parameter):
                    return group_of[id(other)][1]
        if _MATRICES_ONLY in type(optimiser).__name__.lower() and parameter.ndim != 2:
            raise HostError(
                f"{type(optimiser).__name__} steps on matrices only, and the seed has a parameter of shape"
                f" {tuple(parameter.shape)}; pass Growth the optimiser of the other parameters as well,"
                " optimizer=[muon, adamw], or choose a blueprint without biases (lora)"
            )
        return owner


def _kind(parameter: nn.Parameter) -> int:
    """0 for vectors, 1 for matrices, 2 for kernels."""
    return min(max(parameter.ndim - 1, 0), 2)


@contextmanager
def held_rates(optimizer: Optimizer) -> Iterator[None]:
    """A schedule within begins at the rates of now; afterwards the optimiser has them again."""
    before = [{k: deepcopy(v) for k, v in group.items() if k in _RATES} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["initial_lr"] = deepcopy(group["lr"])
    try:
        yield
    finally:
        for group, rates in zip(optimizer.param_groups, before, strict=True):
            del group["initial_lr"]
            group.update(rates)


def check_optimizer(optimizer: Any) -> None:
    """Refuse what is not a single optimiser."""
    if not isinstance(optimizer, Optimizer):
        found = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else type(optimizer).__name__
        raise HostError(
            f"optimizer is {found}; pass one torch.optim.Optimizer, such as AdamW(net.parameters(), lr=1e-3)."
            " Several work in a loop of your own, with Growth"
        )


def _unwrapped(optimizer: Any) -> Optimizer:
    found = optimizer
    while hasattr(found, "optimizer"):
        found = found.optimizer
    kinds = {kind.__name__ for kind in type(found).__mro__}
    if not isinstance(found, Optimizer):
        raise HostError(
            f"optimizer is {type(optimizer).__name__}; pass a torch.optim.Optimizer, a wrapper that has one"
            " as .optimizer, or a list of them"
        )
    if isinstance(found, LBFGS):
        raise HostError(
            "LBFGS keeps all parameters as one flat vector and cannot take in a seed; use AdamW or SGD"
        )
    if kinds & set(_SHARDED):
        raise HostError(
            f"{type(found).__name__} shards its state over processes and cannot take in a seed; use a plain"
            " optimiser under DistributedDataParallel"
        )
    return found


def _check_trainable(net: nn.Module, optimisers: Sequence[Optimizer]) -> None:
    own = {id(p) for p in net.parameters()}
    held = {id(p) for optimiser in optimisers for group in optimiser.param_groups for p in group["params"]}
    if not any(p.requires_grad for p in net.parameters()):
        if not held:
            return
        raise HostError(
            f"no parameter of {type(net).__name__} requires a gradient, so nothing would train; leave at"
            " least its last layer trainable, or, to train seeds alone, pass an optimiser with an empty"
            " group: AdamW([{'params': []}], lr=1e-3)"
        )
    if not own & held:
        raise HostError(
            f"the optimiser holds none of the {len(own)} parameters of this {type(net).__name__}; pass the"
            " one that trains it, made from net.parameters()"
        )
