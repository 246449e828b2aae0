"""Controllers and the trends they decide by; public names are imported on first use.

Only ``PolicyController`` and ``load_policy`` load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.tamiyo.controllers import OffController, PeriodicController, RandomController
    from esper.tamiyo.counting import CountingController
    from esper.tamiyo.heuristic import HeuristicController, HeuristicSettings
    from esper.tamiyo.policy.checkpoint import load_policy
    from esper.tamiyo.policy.controller import PolicyController
    from esper.tamiyo.race_controller import RaceController
    from esper.tamiyo.saturation_controller import SaturationController
    from esper.tamiyo.schedule import Plan, Rotation, Schedule, ScheduleEntry, SeedChoice, parse_plan
    from esper.tamiyo.tracker import SignalTracker

__all__ = ["CountingController", "HeuristicController", "HeuristicSettings", "OffController"]
__all__ += [
    "PeriodicController",
    "Plan",
    "PolicyController",
    "RaceController",
    "RandomController",
    "Rotation",
]
__all__ += ["SaturationController", "Schedule", "ScheduleEntry", "SeedChoice", "SignalTracker"]
__all__ += ["load_policy", "parse_plan"]

_NAMES = {
    "controllers": ("OffController", "PeriodicController", "RandomController"),
    "counting": ("CountingController",),
    "heuristic": ("HeuristicController", "HeuristicSettings"),
    "policy.checkpoint": ("load_policy",),
    "policy.controller": ("PolicyController",),
    "race_controller": ("RaceController",),
    "saturation_controller": ("SaturationController",),
    "schedule": ("Plan", "Rotation", "Schedule", "ScheduleEntry", "SeedChoice", "parse_plan"),
    "tracker": ("SignalTracker",),
}
"""Public names by module."""


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"esper.tamiyo.{module}"), name)
    raise AttributeError(f"module 'esper.tamiyo' has no attribute '{name}'; it offers {', '.join(__all__)}")
