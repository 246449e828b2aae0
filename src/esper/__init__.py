"""Esper: neural networks that grow while they train.

Every name of the package is loaded on first use, so that subpackages that do not need torch import quickly.
"""

from typing import TYPE_CHECKING, Final

from esper.lazy_names import lazy_names

if TYPE_CHECKING:
    from esper.growth.diagnose import diagnose, plant
    from esper.growth.expand import expand
    from esper.growth.grow import grow
    from esper.growth.growth import Growth
    from esper.karn.run import open_run
    from esper.kasmina.blueprint_check import check_blueprint
    from esper.kasmina.blueprints import register_blueprint
    from esper.kasmina.network import MorphogeneticModel
    from esper.kasmina.network_file import load
    from esper.kasmina.plain import harvest

__version__ = "0.1.0"
_MODULES: Final = {
    "Growth": "esper.growth.growth",
    "MorphogeneticModel": "esper.kasmina.network",
    "check_blueprint": "esper.kasmina.blueprint_check",
    "diagnose": "esper.growth.diagnose",
    "expand": "esper.growth.expand",
    "grow": "esper.growth.grow",
    "harvest": "esper.kasmina.plain",
    "load": "esper.kasmina.network_file",
    "open_run": "esper.karn.run",
    "plant": "esper.growth.diagnose",
    "register_blueprint": "esper.kasmina.blueprints",
}
__all__ = ["__version__", *_MODULES]
__getattr__ = lazy_names(__name__, _MODULES)
