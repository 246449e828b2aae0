"""Pictures that answer questions about a run: pure functions from numbers to SVG, with their tables."""

from typing import Final

from esper.karn.figures.alerts import alerts_beside, alerts_picture
from esper.karn.figures.choices import choices_beside, choices_picture
from esper.karn.figures.growth import growth_picture
from esper.karn.figures.heads import heads_beside, heads_picture
from esper.karn.figures.health import health_beside, health_picture
from esper.karn.figures.improvement import improvement_picture
from esper.karn.figures.interactions import interactions_picture
from esper.karn.figures.lanes import lanes_beside, lanes_picture
from esper.karn.figures.picture import Figure, Picture, standalone
from esper.karn.figures.progress import progress_line, progress_picture
from esper.karn.figures.reward import honesty_beside, honesty_picture, reward_beside, reward_picture
from esper.karn.figures.style import STYLE
from esper.karn.figures.times import times_beside, times_picture
from esper.karn.figures.verdict import verdict_picture
from esper.karn.figures.worth import worth_beside, worth_picture
from esper.karn.questions.episodes import EpisodeKey, EpisodeSummary, episodes
from esper.leyline.errors import UnknownNameError

FIGURES: Final[tuple[Figure, ...]] = (
    Figure("progress", "Is it alive, and how far?", progress_picture),
    Figure("growth", "Does growth pay?", growth_picture),
    Figure("lanes", "What does the network look like?", lanes_picture, lanes_beside),
    Figure("worth", "Are seeds worth their cost?", worth_picture, worth_beside),
    Figure("improvement", "Is the controller improving?", improvement_picture),
    Figure("health", "Is PPO healthy?", health_picture, health_beside),
    Figure("heads", "Is a head dead?", heads_picture, heads_beside),
    Figure("choices", "What does it choose?", choices_picture, choices_beside),
    Figure("reward", "What is the reward made of?", reward_picture, reward_beside),
    Figure("honesty", "Is the reward honest?", honesty_picture, honesty_beside),
    Figure("alerts", "What is wrong, and since when?", alerts_picture, alerts_beside),
    Figure("times", "Where does the time go?", times_picture, times_beside),
    Figure("interactions", "Do seeds help or hinder each other?", interactions_picture),
)
"""In the order of the questions, the last one for after a run."""


def figure_named(key: str) -> Figure:
    """One of them."""
    for figure in FIGURES:
        if figure.key == key:
            return figure
    raise UnknownNameError("figure", key[:40], [figure.key for figure in FIGURES])


__all__ = [
    "FIGURES",
    "STYLE",
    "EpisodeKey",
    "EpisodeSummary",
    "Figure",
    "Picture",
    "episodes",
    "figure_named",
    "improvement_picture",
    "interactions_picture",
    "progress_line",
    "standalone",
    "verdict_picture",
]
