"""Blueprints by name and by action index.

A blueprint is a class or function that takes the slot's width and returns a module computing a
residual delta, exactly zero at birth. The built-in ones own the action index of their enum; a
user's takes an index that its topology leaves free, so the policy's head keeps its size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import nn

from esper.leyline.errors import BlueprintError, UnknownNameError
from esper.leyline.factored_actions import (
    BLUEPRINT_IDS,
    CNN_BLUEPRINTS,
    FEATURE_BLUEPRINTS,
    NUM_BLUEPRINTS,
    TRANSFORMER_BLUEPRINTS,
    BlueprintAction,
)

Topology = Literal["feature_map", "tokens", "features"]
Builder = TypeVar("Builder", bound=Callable[[Any], nn.Module])

_BUILT_IN = {"feature_map": CNN_BLUEPRINTS, "tokens": TRANSFORMER_BLUEPRINTS, "features": FEATURE_BLUEPRINTS}


@dataclass(frozen=True, slots=True)
class BlueprintSpec:
    """One registered blueprint."""

    name: str
    topology: Topology
    index: int
    build: Callable[[Any], nn.Module]
    """From the slot's width, or from the block that is copied, to the seed."""
    multiple_of: int
    """Widths that it fits; 1 means all."""
    copies: bool = False
    """Built from a block upstream of the slot, and not zero at birth."""

    def fits(self, width: int) -> bool:
        """Whether it can be built for a slot of ``width``."""
        return width % self.multiple_of == 0


_registry: dict[tuple[Topology, int], BlueprintSpec] = {}


def register_blueprint(
    name: str, topology: Topology, *, multiple_of: int = 1, copies: bool = False
) -> Callable[[Builder], Builder]:
    """Decorator: make ``name`` germinable on hosts of ``topology``.

    In a slot whose width is no multiple of ``multiple_of`` nobody can choose it. One that ``copies`` is
    built from the last block upstream of its slot, not from a width; its delta may be non-zero at birth.

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
        _registry[topology, index] = BlueprintSpec(name, topology, index, build, multiple_of, copies)
        return build

    return register


def _index_for(name: str, topology: Topology) -> int:
    built_in = {BLUEPRINT_IDS[blueprint]: int(blueprint) for blueprint in _BUILT_IN[topology]}
    if name in built_in:
        return built_in[name]
    reserved = {int(BlueprintAction.NOOP), *built_in.values()}
    free = [i for i in range(NUM_BLUEPRINTS) if i not in reserved and (topology, i) not in _registry]
    if not free:
        raise BlueprintError(
            f"no action index is left for blueprint '{name}': {topology} hosts take at most"
            f" {NUM_BLUEPRINTS - len(reserved)} blueprints of a user's own; unregister one first"
        )
    return free[0]


def unregister_blueprint(name: str, topology: Topology) -> None:
    """Take a blueprint out again."""
    del _registry[topology, blueprint_named(name, topology).index]


def blueprint_named(name: str, topology: Topology) -> BlueprintSpec:
    for spec in _registry.values():
        if spec.topology == topology and spec.name == name:
            return spec
    known = [spec.name for spec in specs_for(topology)]
    raise UnknownNameError(f"blueprint for {topology} hosts", name, known)


def blueprint_at(index: int, topology: Topology) -> BlueprintSpec:
    try:
        return _registry[topology, index]
    except KeyError:
        names = ", ".join(f"{spec.index} {spec.name}" for spec in specs_for(topology))
        raise BlueprintError(
            f"no blueprint has index {index} on {topology} hosts; there are {names}"
        ) from None


def specs_for(topology: Topology) -> list[BlueprintSpec]:
    """All blueprints of a topology, by action index."""
    return sorted((s for s in _registry.values() if s.topology == topology), key=lambda spec: spec.index)


def names_for(topology: Topology) -> tuple[str, ...]:
    """The name of every action index on hosts of ``topology``."""
    names = list(BLUEPRINT_IDS)
    for spec in specs_for(topology):
        names[spec.index] = spec.name
    return tuple(names)


def blueprint_names(topologies: set[Topology]) -> tuple[str, ...]:
    """Return the name of every blueprint index for slots of these topologies.

    A single topology uses the registry's indices. With several, a name without an index of its own takes a
    free one; names that find none are appended and cannot be chosen by a controller."""
    if len(topologies) == 1:
        return names_for(next(iter(topologies)))
    specs = [spec for topology in sorted(topologies) for spec in specs_for(topology)]
    built_in = {spec.index for spec in specs if BLUEPRINT_IDS[spec.index] == spec.name}
    names = list(BLUEPRINT_IDS)
    free = [i for i in range(1, NUM_BLUEPRINTS) if i not in built_in]
    for name in dict.fromkeys(spec.name for spec in specs if BLUEPRINT_IDS[spec.index] != spec.name):
        if free:
            names[free.pop(0)] = name
        else:
            names.append(name)
    return tuple(names)
