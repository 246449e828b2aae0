"""Controllers and the trends they decide by. This level loads no torch; the policy network is below it."""

from esper.tamiyo.controllers import OffController, PeriodicController, RandomController
from esper.tamiyo.counting import CountingController
from esper.tamiyo.heuristic import HeuristicController, HeuristicSettings
from esper.tamiyo.schedule import Plan, Rotation, Schedule, ScheduleEntry, SeedChoice, parse_plan
from esper.tamiyo.tracker import SignalTracker

__all__ = [
    "CountingController",
    "HeuristicController",
    "HeuristicSettings",
    "OffController",
    "PeriodicController",
    "Plan",
    "RandomController",
    "Rotation",
    "Schedule",
    "ScheduleEntry",
    "SeedChoice",
    "SignalTracker",
    "parse_plan",
]
