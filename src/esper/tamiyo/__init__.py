"""Tamiyo decides: trends made of facts, and the controllers that act on them. No torch at this level."""

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
