"""Esper: neural networks that grow while they train.

Public names are imported on first use, so that packages without torch import quickly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.growth.diagnose import diagnose, plant
    from esper.growth.grow import grow
    from esper.growth.growth import Growth
    from esper.karn.run import open_run
    from esper.kasmina import MorphogeneticModel, check_blueprint, harvest, register_blueprint
    from esper.kasmina.checkpoint import load

__version__ = "0.1.0"
__all__ = [
    "Growth",
    "MorphogeneticModel",
    "__version__",
    "check_blueprint",
    "diagnose",
    "grow",
    "harvest",
    "load",
    "open_run",
    "plant",
    "register_blueprint",
]


_HOMES = {
    "Growth": "esper.growth",
    "diagnose": "esper.growth",
    "grow": "esper.growth",
    "load": "esper.kasmina.checkpoint",
    "plant": "esper.growth",
    "open_run": "esper.karn.run",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_HOMES.get(name, "esper.kasmina")), name)
    raise AttributeError(f"module 'esper' has no attribute '{name}'; it offers {', '.join(__all__)}")
