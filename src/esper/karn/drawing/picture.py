"""What an answer looks like: a drawing, the table of the same numbers, and a sentence about both.

A drawing that stands alone, as a file or in a notebook, carries its stylesheet and follows light and dark.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from esper.karn.drawing.style import STYLE
from esper.karn.drawing.svg import element
from esper.karn.questions.episode_selection import EpisodeKey
from esper.karn.questions.series import Series
from esper.karn.run import Run

Text = Callable[[float | None], str]
"""How a value reads."""
_VALUE: Final = r"(∞|[<+-]?×?\d[\d,.:e+-]*( ± [\d.e-]+)?( (%|s|ms|[kMGTPE]?FLOP))?)"
_NUMBER: Final = re.compile(rf"{_VALUE}( \({_VALUE} to {_VALUE}\))?|–|")


def numeric_columns(rows: Sequence[Sequence[str]]) -> list[bool]:
    """Which columns of a table hold nothing but numbers, and are set flush right on every page."""
    return [all(_NUMBER.fullmatch(cell) for cell in column) for column in zip(*rows, strict=True)]


def series_table(
    found: Series, text: Text, texts: Mapping[str, Text] = MappingProxyType({})
) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a table with all values of courses: ``texts`` by name, ``text`` for all others."""
    cells = [map(texts.get(name, text), values) for name, values in found.values.items()]
    rows = [[str(place), *row] for place, *row in zip(found.bins, *cells, strict=True)]
    return [found.axis, *found.values], rows


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

    def standalone(self) -> str:
        """The text of an SVG file."""
        opening, mark, rest = self.svg.partition(">")
        return opening + mark + element("style", STYLE) + rest

    _repr_svg_ = standalone  # what a notebook shows


class Figure(NamedTuple):
    """One of the questions that a run answers: a function to its numbers, and one from them to a picture."""

    key: str
    question: str
    ask: Callable[..., Any]
    """The numbers of a run, or of one of its episodes if the question is about one; None: it has none."""
    draw: Callable[[Any, Any], Picture]
    """The picture of these numbers, on axes that hold those of another run too unless they are None."""

    def answer(
        self, run: Run, episode: EpisodeKey | None = None, beside: Run | None = None
    ) -> Picture | None:
        """The picture of this run, or of one of its episodes; None: it has nothing to show for it."""
        found = self.ask(run) if episode is None else self.ask(run, episode)
        if found is None:
            return None
        other = None if beside is None else self.ask(beside)
        if getattr(other, "axis", None) != getattr(found, "axis", None):
            other = None  # one counts epochs and the other iterations: they have no axis in common
        return self.draw(found, other)
