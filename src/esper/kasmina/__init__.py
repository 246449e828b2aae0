"""The body: hosts, slots, blueprints, lifecycle."""

from esper.kasmina.blueprints import Mirrored, register_blueprint
from esper.kasmina.contract import check_blueprint
from esper.kasmina.export import harvest, load_committed, save_committed
from esper.kasmina.hosts import CNNHost, Host
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.slot import SeedSlot
from esper.kasmina.streams import TorchStream

__all__ = [
    "CNNHost",
    "Host",
    "Mirrored",
    "MorphogeneticModel",
    "SeedSlot",
    "TorchStream",
    "check_blueprint",
    "harvest",
    "load_committed",
    "register_blueprint",
    "save_committed",
]
