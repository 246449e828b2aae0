"""Growth of a user's own network: inside a training loop, with one call, or after a diagnosis."""

from esper.lazy_names import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "Diagnosis": "esper.growth.diagnosis_report",
        "Grown": "esper.growth.grow",
        "Growth": "esper.growth.growth",
        "GrowthEvent": "esper.growth.growth_events",
        "GrowthWarning": "esper.leyline.errors",
        "Site": "esper.kasmina.sites",
        "find_sites": "esper.kasmina.sites",
        "load": "esper.kasmina.network_file",
    },
)
