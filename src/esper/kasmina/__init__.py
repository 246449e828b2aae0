"""Networks that grow: hosts, slots, blueprints, lifecycle, contributions, compute."""

from esper.lazy_names import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "CNNHost": "esper.kasmina.hosts",
        "Host": "esper.kasmina.host",
        "Mirrored": "esper.kasmina.blueprints",
        "MorphogeneticModel": "esper.kasmina.network",
        "SeedSlot": "esper.kasmina.slot",
        "TorchStream": "esper.kasmina.random_streams",
        "check_blueprint": "esper.kasmina.blueprint_check",
        "harvest": "esper.kasmina.plain",
        "load": "esper.kasmina.network_file",
        "register_blueprint": "esper.kasmina.blueprints",
    },
)
