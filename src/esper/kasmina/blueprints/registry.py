"""Registry of blueprints by name and by action index.

A blueprint is a class or function that takes the slot's width and returns a module which computes a residual
delta, exactly zero at birth. A built-in blueprint has the action index of its ``BlueprintAction``. A user's
blueprint gets a free action index of its topology, so that the size of the policy's output does not change.
"""

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from esper.leyline.errors import BlueprintError, UnknownNameError
from esper.leyline.factored_actions import (
    BLUEPRINT_NAMES,
    CNN_BLUEPRINTS,
    FEATURE_BLUEPRINTS,
    NUM_BLUEPRINTS,
    TRANSFORMER_BLUEPRINTS,
    BlueprintAction,
)

Topology = Literal["feature_map", "tokens", "features", "volume"]
Builder = TypeVar("Builder", bound=Callable[[Any], nn.Module])

_BUILT_IN = {
    "feature_map": CNN_BLUEPRINTS,
    "tokens": TRANSFORMER_BLUEPRINTS,
    "features": FEATURE_BLUEPRINTS,
    "volume": CNN_BLUEPRINTS,
}


@dataclass(frozen=True, slots=True)
class BlueprintSpec:
    """Registered blueprint: name, topology, action index, and the function that builds its seeds."""

    name: str
    topology: Topology
    index: int
    build: Callable[[Any], nn.Module]
    """Function that builds a seed: from the block to copy if ``copies`` is True, from the layers to widen if
    ``widens`` is True, otherwise from the width of the slot."""
    multiple_of: int
    """Number that the width of the slot must be a multiple of."""
    copies: bool = False
    """Whether a seed copies a block upstream of the slot; such a seed is not zero at birth."""
    widens: bool = False
    """Whether a seed adds hidden units between two layers of the network."""


_registry: dict[tuple[Topology, int], BlueprintSpec] = {}


def register_blueprint(
    name: str, topology: Topology, *, multiple_of: int = 1, copies: bool = False, widens: bool = False
) -> Callable[[Builder], Builder]:
    """Return a decorator that registers a class or function as a blueprint.

    Args:
        name: Name of the blueprint, unique for its topology.
        topology: Kind of features that seeds of the blueprint take.
        multiple_of: Number of which the width of a slot must be a multiple to hold such a seed.
        copies: Build the seed from the last block upstream of the slot instead of the slot's width; the delta
            may be non-zero at birth.
        widens: Build the seed from a pair of layers, between which it adds hidden units.

    Raises:
        BlueprintError: The name is registered already, ``multiple_of`` is below 1, or no action index is
            free.
        UnknownNameError: The topology does not exist.

    Example:
        >>> @register_blueprint("my_block", topology="feature_map")
        ... class MyBlock(nn.Module): ...
    """

    def register(build: Builder) -> Builder:
        if topology not in _BUILT_IN:
            raise UnknownNameError("topology", topology, _BUILT_IN)
        if multiple_of < 1:
            raise BlueprintError(
                f"multiple_of must be 1 or more; blueprint '{name}' has {multiple_of}. Leave it out if every"
                " width will do"
            )
        taken = {spec.name for spec in _registry.values() if spec.topology == topology}
        if name in taken:
            raise BlueprintError(
                f"blueprint '{name}' is registered for {topology} already; choose another name"
                f" (taken: {', '.join(sorted(taken))})"
            )
        index = _index_for(name, topology)
        _registry[topology, index] = BlueprintSpec(name, topology, index, build, multiple_of, copies, widens)
        return build

    return register


def _index_for(name: str, topology: Topology) -> int:
    built_in = {BLUEPRINT_NAMES[blueprint]: int(blueprint) for blueprint in _BUILT_IN[topology]}
    if name in built_in:
        return built_in[name]
    reserved = {int(BlueprintAction.NOOP), *built_in.values()}
    free = [i for i in range(NUM_BLUEPRINTS) if i not in reserved and (topology, i) not in _registry]
    if not free:
        raise BlueprintError(
            f"no action index is left for blueprint '{name}': {topology} hosts have"
            f" {', '.join(spec.name for spec in specs_for(topology))}; unregister one of yours first"
        )
    return free[0]


def unregister_blueprint(name: str, topology: Topology) -> None:
    """Remove a blueprint from the registry."""
    del _registry[topology, blueprint_named(name, topology).index]


def blueprint_named(name: str, topology: Topology) -> BlueprintSpec:
    """Return the registered blueprint ``name``; raise UnknownNameError if there is none."""
    for spec in _registry.values():
        if spec.topology == topology and spec.name == name:
            return spec
    known = [spec.name for spec in specs_for(topology)]
    raise UnknownNameError(f"blueprint for {topology} hosts", name, known)


def specs_for(topology: Topology) -> list[BlueprintSpec]:
    """Return all blueprints of a topology, sorted by action index."""
    return sorted((s for s in _registry.values() if s.topology == topology), key=lambda spec: spec.index)


def all_blueprints() -> list[BlueprintSpec]:
    """Return the blueprints of all topologies."""
    return list(_registry.values())


def blueprint_names(topologies: Collection[Topology]) -> tuple[str, ...]:
    """Return the name of every blueprint index, for a host with slots of the given topologies.

    For a single topology the blueprint indices are those of the registry. With several topologies, blueprints
    that are not built in get free indices. Names of blueprints for which no index is left are appended, and
    controllers cannot choose these blueprints.
    """
    specs = [spec for topology in sorted(topologies) for spec in specs_for(topology)]
    names = list(BLUEPRINT_NAMES)
    if len(topologies) == 1:
        for spec in specs:
            names[spec.index] = spec.name
        return tuple(names)
    built_in = {spec.index for spec in specs if BLUEPRINT_NAMES[spec.index] == spec.name}
    free = [i for i in range(1, NUM_BLUEPRINTS) if i not in built_in]
    for name in dict.fromkeys(spec.name for spec in specs if BLUEPRINT_NAMES[spec.index] != spec.name):
        if free:
            names[free.pop(0)] = name
        else:
            names.append(name)
    return tuple(names)


class Mirrored(nn.Module):
    """Module that returns one(h) + other(h); ``other`` starts as a copy of ``one`` with a negated last layer.

    The delta of a new seed must be exactly zero. If the last layer of a seed started with zero weights, the
    layers before it would receive no gradient in the first step and only a small gradient in the second. With
    two branches that cancel, every weight receives a gradient in the first backward pass.

    Rounding is symmetric in the sign, so the sum of the two branches is zero bit for bit. In the first step
    the last layers of the two branches receive equal gradients and the layers before them opposite gradients,
    so that the branches differ from then on. Layers of the branches must not contain dropout, which would
    draw a different mask for each branch.
    """

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.one = nn.Sequential(*layers)
        self.other = copy.deepcopy(self.one)
        with torch.no_grad():
            for weight in self.other[-1].parameters():
                weight.neg_()

    def forward(self, h: Tensor) -> Tensor:
        delta: Tensor = self.one(h) + self.other(h)
        return delta
