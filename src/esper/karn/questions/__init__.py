"""What a run can be asked: pure functions from its rows to numbers, the source of every view."""

from esper.karn.questions.growth import Growth, GrowthPoint, growth
from esper.karn.questions.lanes import Lane, Lanes, Mark, Span, lanes
from esper.karn.questions.lives import LifeKey, LifeSummary, default_life, life_name, lives

__all__ = [
    "Growth",
    "GrowthPoint",
    "Lane",
    "Lanes",
    "LifeKey",
    "LifeSummary",
    "Mark",
    "Span",
    "default_life",
    "growth",
    "lanes",
    "life_name",
    "lives",
]
