"""Controllers that decide when a network grows: rules, fixed plans and trained policies."""

from esper.lazy_names import lazy_names

_NAMES = {
    "controllers": "OffController PeriodicController RandomController",
    "counting": "CountingController",
    "heuristic": "HeuristicController HeuristicSettings",
    "policy.checkpoint": "load_policy",
    "policy.controller": "PolicyController",
    "race_controller": "RaceController",
    "saturation_controller": "SaturationController",
    "schedule": "Plan Rotation Schedule ScheduleEntry SeedChoice parse_plan planned_blueprints",
    "tracker": "SignalTracker",
}
"""Public names of this package by the module that defines them; a module is imported on first use."""
__getattr__ = lazy_names(
    __name__, {name: f"esper.tamiyo.{module}" for module, names in _NAMES.items() for name in names.split()}
)
