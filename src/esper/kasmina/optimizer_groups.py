"""Parameter groups of seeds in the optimisers that train a network, and learning-rate schedules.

In a user's training loop, the parameters of a seed join the parameter group of the neighbouring layers, so
that learning rate, scheduler, gradient scaler, accumulation and clipping apply to the seed too. An additional
parameter group would break common schedulers. In an environment, where Esper sets all learning rates, each
seed has a separate parameter group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Final, Literal

from torch import Size, Tensor, nn
from torch.optim import LBFGS, Optimizer

from esper.kasmina.optimizer_state import Enlarged, Group, clone_tree, extended, grows_with, joined_state
from esper.leyline.errors import HostError

_SHARDED: Final = ("ZeroRedundancyOptimizer", "DeepSpeedZeroOptimizer", "_NamedOptimizer")
_MATRICES_ONLY: Final = "muon"
"""Part of the class names of optimisers that can train only matrices."""
_RATES: Final = ("lr", "initial_lr")
SEED_NAME: Final = "esper_slot"
"""Name that occurs in the path of every parameter of a seed."""


class OptimizerGroups:
    """Optimisers of a network, and the parameter groups that train its seeds.

    Args:
        optimizer: One optimiser, a wrapper with ``.optimizer``, a list of optimisers or wrappers, or None.
        net: Network that the optimisers train.
        calls: Position of every submodule in the order of the forward pass, by path, to find the layers next
            to a seed; needed unless ``separate`` is True.
        separate: Whether each seed has a separate parameter group.

    Raises:
        HostError: An optimiser cannot accept new parameters, or trains no parameter of the network.
    """

    def __init__(
        self,
        optimizer: Any,
        net: nn.Module,
        calls: Mapping[str, int] | None = None,
        *,
        separate: bool = False,
    ) -> None:
        several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        self.optimisers = [_unwrapped(each) for each in several if each is not None]
        self._calls = {net.get_submodule(path): position for path, position in (calls or {}).items()}
        self._net = net
        self._separate = separate
        self._own: dict[int, Group] = {}
        if self.optimisers:
            _check_trainable(net, self.optimisers)

    @property
    def _groups(self) -> list[tuple[Optimizer, Group]]:
        return [(optimiser, group) for optimiser in self.optimisers for group in optimiser.param_groups]

    def own_group(self, slot: int) -> Group:
        """Return the parameter group that contains only the seed in ``slot``."""
        return self._own[slot]

    def join(self, slot: int, module: nn.Module, new: Iterable[nn.Parameter]) -> None:
        """Add the parameters ``new`` of the seed in ``slot`` to the optimisers; ``module`` is the submodule
        that has the slot.

        If a parameter group lists its parameters in the order of the network, new parameters are inserted in
        that order, so that the saved state of the group fits an optimiser that is made later for the grown
        network.
        """
        if not self.optimisers:
            return
        parameters = list(new)
        if self._separate:
            [optimiser] = self.optimisers
            optimiser.add_param_group({"params": parameters})
            self._own[slot] = optimiser.param_groups[-1]
            return
        held = {id(p) for _, group in self._groups for p in group["params"]}
        near = self.near(module)
        chosen = [(p, self._group_for(p, near)) for p in parameters if id(p) not in held]
        place = {id(p): number for number, p in enumerate(self._net.parameters())}
        for parameter, group in chosen:
            places = [place.get(id(p), -1) for p in group["params"]]
            later = [i for i, p in enumerate(places) if p > place[id(parameter)]]
            in_order = places == sorted(places) and -1 not in places
            group["params"].insert(later[0] if later and in_order else len(places), parameter)

    def leave(self, slot: int, old: Iterable[Tensor]) -> None:
        """Remove the parameters ``old`` of the seed in ``slot`` from their groups, and delete their optimiser
        state."""
        gone = {id(parameter): parameter for parameter in old}
        own = self._own.pop(slot, None)
        for optimiser in self.optimisers:
            optimiser.param_groups[:] = [group for group in optimiser.param_groups if group is not own]
            for group in optimiser.param_groups:
                group["params"][:] = [p for p in group["params"] if id(p) not in gone]
            for parameter in gone.values():
                optimiser.state.pop(parameter, None)

    def copy_moments(
        self, old: Iterable[nn.Parameter], new: Iterable[nn.Parameter], without: Collection[nn.Parameter] = ()
    ) -> None:
        """Copy the optimiser state of each parameter in ``old`` to its counterpart in ``new``, if the same
        optimiser trains both; the new parameters ``without`` get no state.
        """
        fresh = {id(parameter) for parameter in without}
        for theirs, ours in zip(old, new, strict=True):
            source, target = self._optimiser_of(theirs), self._optimiser_of(ours)
            if source is not None and source is target and theirs in source.state and id(ours) not in fresh:
                source.state[ours] = clone_tree(source.state[theirs])

    def extend_moments(self, parameter: nn.Parameter, before: Size) -> None:
        """Extend the optimiser state of a parameter by zeros, after the parameter has grown from the shape
        ``before``.

        Raises:
            HostError: An optimiser keeps a tensor of which it is unknown how it grows with the parameter.
        """
        for optimiser in self.optimisers:
            kept = optimiser.state.get(parameter, {})
            for name, value in kept.items():
                if not grows_with(value, before):
                    raise HostError(
                        f"{type(optimiser).__name__} keeps '{name}' of shape {tuple(value.shape)} for a"
                        f" parameter of shape {tuple(before)}, and it is unknown how this state grows with"
                        " the parameter; use an optimiser such as AdamW or SGD"
                    )
            if kept:
                optimiser.state[parameter] = {
                    name: extended(value, before, parameter.shape) for name, value in kept.items()
                }

    def enlarge(self, enlarged: Iterable[Enlarged]) -> None:
        """Replace parameters in their groups by larger ones, join the optimiser state of the additional
        parameters to theirs, and remove the additional parameters.

        A state without one value per element of its parameter cannot be joined and is deleted.
        """
        changes = list(enlarged)
        for change in changes:
            optimiser = self._optimiser_of(change.old)
            if optimiser is None:
                continue
            [group] = [g for g in optimiser.param_groups if any(p is change.old for p in g["params"])]
            group["params"][:] = [change.parameter if p is change.old else p for p in group["params"]]
            old = optimiser.state.pop(change.old, {})
            new = {} if change.new is None else optimiser.state.get(change.new, {})
            state = joined_state(change, old, new, group)
            if state:
                optimiser.state[change.parameter] = state
        self.leave(-1, [change.new for change in changes if change.new is not None])

    def state(self) -> dict[str, Any]:
        """Return the state dicts of the optimisers, and the order in which the seeds with separate groups
        were added."""
        return {
            "order": list(self._own),
            "optimisers": [deepcopy(optimiser.state_dict()) for optimiser in self.optimisers],
        }

    def load_state(
        self, state: dict[str, Any], parameters_of: Callable[[int], Sequence[nn.Parameter]]
    ) -> None:
        """Restore the optimisers from ``state``; ``parameters_of`` returns the parameters of the present seed
        of a slot.
        """
        for slot, group in list(self._own.items()):
            self.leave(slot, list(group["params"]))
        if self._separate:
            for slot in state["order"]:
                self.join(slot, self._net, parameters_of(slot))
        for optimiser, kept in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(deepcopy(kept))
        if self._own:  # load_state_dict has replaced the parameter groups.
            groups = self.optimisers[0].param_groups[-len(self._own) :]
            self._own = dict(zip(state["order"], groups, strict=True))

    def _optimiser_of(self, parameter: Tensor) -> Optimizer | None:
        return next((o for o, group in self._groups if any(p is parameter for p in group["params"])), None)

    def near(self, module: nn.Module) -> list[list[nn.Parameter]]:
        """Return the host's parameters, one list per layer: first those of ``module``, then the layers
        upstream of it, nearest first, then the layers downstream."""
        here = self._calls.get(module, -1)
        before = [other for other, position in self._calls.items() if position < here]
        after = [other for other, position in self._calls.items() if position > here]
        layers = [host_parameters(module)]
        layers += [list(other.parameters(recurse=False)) for other in (*before[::-1], *after)]
        layers.append(host_parameters(self._net))  # Modules that did not run on the sample input come last.
        return [layer for layer in layers if layer]

    def _group_for(self, parameter: nn.Parameter, near: Sequence[Sequence[nn.Parameter]]) -> Group:
        """Return the group for a parameter of a seed: the group of the nearest host parameter of its kind.

        A parameter is of kind vector, matrix or kernel. Parameters of another kind could be in another group:
        vectors are often in a separate group without weight decay, and some optimisers accept only matrices.
        """
        group_of = {id(p): (o, group) for o, group in self._groups for p in group["params"]}
        held = [[p for p in layer if id(p) in group_of] for layer in near]
        held = [layer for layer in held if layer]
        if not held and not any(p.requires_grad for layer in near for p in layer):
            return self._groups[0][1]  # All host parameters are frozen, so the optimiser trains only seeds.
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


def host_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of ``module`` that belong to no seed."""
    return [p for name, p in module.named_parameters() if SEED_NAME not in name.split(".")]


def _kind(parameter: nn.Parameter) -> int:
    """Return 0 for a vector, 1 for a matrix, 2 for a convolution kernel."""
    return min(max(parameter.ndim - 1, 0), 2)


def rates_of(optimizer: Optimizer) -> list[Group]:
    """Return the learning rates of every parameter group, for ``restore_rates``."""
    return [{k: deepcopy(v) for k, v in group.items() if k in _RATES} for group in optimizer.param_groups]


def restore_rates(optimizer: Optimizer, rates: Sequence[Group]) -> None:
    """Restore the learning rates that ``rates_of`` returned."""
    for group, before in zip(optimizer.param_groups, rates, strict=True):
        group.pop("initial_lr", None)
        group.update(before)


@contextmanager
def present_rates(optimizer: Optimizer) -> Iterator[None]:
    """Let the learning-rate schedule of a race inside the context start from the present rates."""
    rates = rates_of(optimizer)
    for group in optimizer.param_groups:
        group["initial_lr"] = deepcopy(group["lr"])
    try:
        yield
    finally:
        restore_rates(optimizer, rates)


def check_optimizer(optimizer: Any) -> None:
    """Raise HostError unless ``optimizer`` is a single torch optimiser."""
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


ScheduleKind = Literal["cosine", "wsd"]
DECAY_SHARE: Final = 0.2
"""Last fraction of a training, over which a warmup-stable-decay schedule lowers the learning rate to zero."""


def cosine_rate(base: float, progress: float) -> float:
    """Return a cosine schedule's learning rate: ``base`` at progress 0, zero at progress 1."""
    return base * 0.5 * (1.0 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))


def wsd_factor(progress: float, minibatch: int, warmup: int) -> float:
    """Return the learning-rate factor of a warmup-stable-decay schedule (Hu et al. 2024): it rises to 1 over
    ``warmup`` minibatches, stays at 1, and falls linearly to 0 over the last ``DECAY_SHARE`` of the training.
    """
    return min(1.0, (minibatch + 1) / (warmup + 1), max((1.0 - progress) / DECAY_SHARE, 0.0))
