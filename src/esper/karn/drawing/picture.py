"""Picture of numbers of a run: a drawing, a table of the same numbers, and a caption.

A standalone drawing, as a file or in a notebook, includes its stylesheet and follows the light or dark theme.
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
"""Function that formats a number as text."""
_VALUE: Final = r"(∞|[<+-]?×?\d[\d,.:e+-]*( ± [\d.e-]+)?( (%|s|ms|[kMGTPE]?FLOP))?)"
_NUMBER: Final = re.compile(rf"{_VALUE}( \({_VALUE} to {_VALUE}\))?|–|")


def numeric_columns(rows: Sequence[Sequence[str]]) -> list[bool]:
    """Return for each column of a table whether it holds only numbers; such columns are right-aligned."""
    return [all(_NUMBER.fullmatch(cell) for cell in column) for column in zip(*rows, strict=True)]


def series_table(
    found: Series, text: Text, texts: Mapping[str, Text] = MappingProxyType({})
) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of all series, formatted by ``texts[name]`` or else by ``text``."""
    cells = [map(texts.get(name, text), values) for name, values in found.values.items()]
    rows = [[str(bin_), *row] for bin_, *row in zip(found.bins, *cells, strict=True)]
    return [found.axis, *found.values], rows


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing and its table, made from the same numbers."""

    svg: str
    columns: list[str]
    rows: list[list[str]]
    caption: str

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"every row of the table needs {len(self.columns)} cells: {self.columns}")

    def standalone(self) -> str:
        """Return the content of an SVG file."""
        opening, mark, rest = self.svg.partition(">")
        return opening + mark + element("style", STYLE) + rest

    _repr_svg_ = standalone  # Jupyter displays an object by its method _repr_svg_.


class Figure(NamedTuple):
    """Figure about a run: a function that computes numbers and a function that draws them."""

    key: str
    question: str
    ask: Callable[..., Any]
    """Return the numbers of a run, or of one episode in a figure of slot lanes; None if there are no numbers.
    """
    draw: Callable[[Any, Any], Picture]
    """Draw the numbers of a run on axes that also include the numbers of a second run, if given."""

    def answer(
        self, run: Run, episode: EpisodeKey | None = None, compared: Run | None = None
    ) -> Picture | None:
        """Return the picture of a run or of one episode; None if there is nothing to show."""
        found = self.ask(run) if episode is None else self.ask(run, episode)
        if found is None:
            return None
        other = None if compared is None else self.ask(compared)
        if getattr(other, "axis", None) != getattr(found, "axis", None):
            other = None  # Runs over epochs and runs over iterations have no common axis.
        return self.draw(found, other)
