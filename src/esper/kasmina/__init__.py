"""Networks that grow: hosts, slots, blueprints, lifecycle, contributions, compute."""

from esper.kasmina.blueprint_check import check_blueprint
from esper.kasmina.blueprints import Mirrored, register_blueprint
from esper.kasmina.checkpoint import load
from esper.kasmina.hosts import CNNHost, Host
from esper.kasmina.network import MorphogeneticModel
from esper.kasmina.plain import harvest
from esper.kasmina.random_streams import TorchStream
from esper.kasmina.slot import SeedSlot

__all__ = [
    "CNNHost",
    "Host",
    "Mirrored",
    "MorphogeneticModel",
    "SeedSlot",
    "TorchStream",
    "check_blueprint",
    "harvest",
    "load",
    "register_blueprint",
]
