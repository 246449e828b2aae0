"""Esper: neural networks that grow while they train.

Public names are imported on first use, so that packages without torch import quickly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.growth import Growth, add, diagnose, load
    from esper.growth.grow import grow
    from esper.karn.run import open_run
    from esper.kasmina import MorphogeneticModel, check_blueprint, harvest, load_committed, register_blueprint

__version__ = "0.1.0"
__all__ = [
    "Growth",
    "MorphogeneticModel",
    "__version__",
    "add",
    "check_blueprint",
    "diagnose",
    "grow",
    "harvest",
    "load",
    "load_committed",
    "open_run",
    "register_blueprint",
]


_HOMES = {
    "Growth": "esper.growth",
    "add": "esper.growth",
    "diagnose": "esper.growth",
    "grow": "esper.growth",
    "load": "esper.growth",
    "open_run": "esper.karn.run",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_HOMES.get(name, "esper.kasmina")), name)
    raise AttributeError(f"module 'esper' has no attribute '{name}'; it offers {', '.join(__all__)}")
