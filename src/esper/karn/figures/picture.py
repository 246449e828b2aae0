"""What an answer looks like: a drawing, the table of the same numbers, and a sentence about both.

A drawing that stands alone, as a file or in a notebook, carries its stylesheet and follows light and dark.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from esper.karn.figures.style import STYLE
from esper.karn.figures.svg import element
from esper.karn.questions.episodes import EpisodeKey
from esper.karn.run import Run


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing and its table, both made from the same numbers."""

    svg: str
    columns: list[str]
    rows: list[list[str]]
    caption: str

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"every row of the table needs {len(self.columns)} cells: {self.columns}")

    def _repr_svg_(self) -> str:
        """What a notebook shows."""
        return standalone(self)


def standalone(picture: Picture) -> str:
    """The text of an SVG file."""
    opening, mark, rest = picture.svg.partition(">")
    return opening + mark + element("style", STYLE) + rest


@dataclass(frozen=True, slots=True)
class Figure:
    """One of the questions that a run answers."""

    key: str
    question: str
    draw: Callable[[Run, EpisodeKey | None], Picture | None]
    draw_beside: Callable[[Run, Run], Picture | None] | None = None
    """Draws the first run on axes that hold the second one too; None: it has no axes to share."""

    def answer(self, run: Run, episode: EpisodeKey | None = None) -> Picture | None:
        """The picture of this run, or of one of its episodes; None: it has nothing to show for it."""
        return self.draw(run, episode)

    def answer_beside(self, run: Run, other: Run) -> Picture | None:
        """The picture of this run, to be compared with that of another one."""
        return self.draw(run, None) if self.draw_beside is None else self.draw_beside(run, other)
