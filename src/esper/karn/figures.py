"""List of all charts of a run, in display order."""

from functools import partial
from typing import Final

from esper.karn.drawing.chart import draw
from esper.karn.drawing.picture import Figure
from esper.karn.questions.alerts import alerts, draw_alerts
from esper.karn.questions.breakdowns import choices, choices_chart, draw_times, reward, reward_chart, times
from esper.karn.questions.honesty import draw_honesty, honesty
from esper.karn.questions.learning_curves import growth, growth_chart, improvement, improvement_chart
from esper.karn.questions.policy_health import draw_heads, draw_health, heads, health
from esper.karn.questions.slot_lanes import draw_lanes, lanes
from esper.karn.questions.worth import draw_interactions, draw_worth, interactions, worth
from esper.leyline.errors import UnknownNameError

FIGURES: Final[tuple[Figure, ...]] = (
    Figure("growth", "Does growth pay?", growth, partial(draw, growth_chart)),
    Figure("lanes", "What does the network look like?", lanes, draw_lanes),
    Figure("worth", "Are seeds worth their cost?", worth, draw_worth),
    Figure("improvement", "Is the controller improving?", improvement, partial(draw, improvement_chart)),
    Figure("health", "Is PPO healthy?", health, draw_health),
    Figure("heads", "Is a head dead?", heads, draw_heads),
    Figure("choices", "What does the controller choose?", choices, partial(draw, choices_chart)),
    Figure("reward", "Which terms make up the reward?", reward, partial(draw, reward_chart)),
    Figure("honesty", "Is the reward honest?", honesty, draw_honesty),
    Figure("alerts", "What is wrong, and since when?", alerts, draw_alerts),
    Figure("times", "Where does the time go?", times, draw_times),
    Figure("interactions", "Do seeds help or hinder each other?", interactions, draw_interactions),
)


def figure_named(key: str) -> Figure:
    """Return the chart with the given key; raises ``UnknownNameError`` for an unknown key."""
    for figure in FIGURES:
        if figure.key == key:
            return figure
    raise UnknownNameError("figure", key[:40], [figure.key for figure in FIGURES])
