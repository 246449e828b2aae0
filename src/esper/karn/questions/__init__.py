"""What a run can be asked: pure functions from its rows to numbers, the source of every view."""

from esper.karn.questions.episodes import EpisodeKey, EpisodeSummary, default_episode, episode_name, episodes
from esper.karn.questions.growth import Growth, GrowthPoint, growth
from esper.karn.questions.lanes import Lane, Lanes, Mark, Span, lanes

__all__ = [
    "EpisodeKey",
    "EpisodeSummary",
    "Growth",
    "GrowthPoint",
    "Lane",
    "Lanes",
    "Mark",
    "Span",
    "default_episode",
    "episode_name",
    "episodes",
    "growth",
    "lanes",
]
