"""Pictures that answer questions about a run: pure functions from numbers to SVG, with their tables."""

from typing import Final

from esper.karn.figures.growth import growth_picture
from esper.karn.figures.lanes import lanes_picture
from esper.karn.figures.picture import Figure, Picture
from esper.karn.figures.style import STYLE
from esper.karn.questions.lives import LifeKey, LifeSummary, lives

FIGURES: Final[tuple[Figure, ...]] = (
    Figure("growth", "Does growth pay?", growth_picture),
    Figure("lanes", "What does the network look like?", lanes_picture),
)
"""In the order of the questions."""

__all__ = ["FIGURES", "STYLE", "Figure", "LifeKey", "LifeSummary", "Picture", "lives"]
