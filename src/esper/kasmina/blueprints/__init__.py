"""Blueprints: importing this package registers the built-in ones."""

from esper.kasmina.blueprints import conv as _conv  # noqa: F401  registers on import
from esper.kasmina.blueprints import stack as _stack  # noqa: F401
from esper.kasmina.blueprints import tokens as _tokens  # noqa: F401
from esper.kasmina.blueprints import vectors as _vectors  # noqa: F401
from esper.kasmina.blueprints.mirror import Mirrored
from esper.kasmina.blueprints.registry import (
    BlueprintSpec,
    Topology,
    blueprint_at,
    blueprint_named,
    names_for,
    register_blueprint,
    specs_for,
    unregister_blueprint,
)

__all__ = [
    "BlueprintSpec",
    "Mirrored",
    "Topology",
    "blueprint_at",
    "blueprint_named",
    "names_for",
    "register_blueprint",
    "specs_for",
    "unregister_blueprint",
]
