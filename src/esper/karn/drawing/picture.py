"""Picture: a chart of numbers of a run, a table of the same numbers, and a caption.

All charts have one stylesheet: colours, text, and the CSS classes of shapes. On a page, each chart is in an
HTML element of class ``picture``; if the element is narrow, the text of the chart is larger. A standalone
chart, as a file or in a notebook, includes its stylesheet and follows the reader's light or dark theme.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from esper.karn.drawing.svg import element
from esper.karn.palette import LOOKS, SEVERITIES, css_variables, stage_variable
from esper.karn.questions.episode_selection import EpisodeKey
from esper.karn.questions.series import Series
from esper.karn.run import Run

Text = Callable[[float | None], str]
"""Function that formats a number as text."""
_VALUE: Final = r"(∞|[<+-]?×?\d[\d,.:e+-]*( ± [\d.e-]+)?( (%|s|ms|[kMGTPE]?FLOP))?)"
_NUMBER: Final = re.compile(rf"{_VALUE}( \({_VALUE} to {_VALUE}\))?|–|")
LEVELS: Final = 10
"""Number of steps from the lightest to the darkest shade; the CSS classes of the shades are ``shade-0`` to
``shade-10``.
"""
_PART_OPACITIES: Final = (0.72, 0.46, 0.28, 0.15, 0.6, 0.36)
"""Opacities of the CSS classes ``part-0``, ``part-1`` and so on, which distinguish the parts of a stacked
column if the chart has one colour.
"""


def part_look(index: int) -> str:
    """Return the CSS class of a part of stacked columns, by the index of the part in the stack."""
    return f"part part-{index % len(_PART_OPACITIES)}"


def shade_look(fraction: float) -> str:
    """Return the CSS class of the shade for a fraction between 0 and 1."""
    return f"shade-{round(min(max(fraction, 0.0), 1.0) * LEVELS)}"


def _coloured() -> str:
    rules = [
        f".esper .shade-{level}{{fill:var(--ink);fill-opacity:{0.06 + 0.72 * level / LEVELS:.2f}}}"
        for level in range(LEVELS + 1)
    ]
    rules += [
        f".esper .part-{index}{{fill-opacity:{opacity}}}" for index, opacity in enumerate(_PART_OPACITIES)
    ]
    colours = {stage.name.lower(): stage_variable(stage) for stage in LOOKS}
    for name, colour in (colours | {severity: f"--{severity}" for severity in SEVERITIES}).items():
        rules.append(f".esper .{name}{{fill:var({colour})}}.esper .{name}-line{{stroke:var({colour})}}")
    return "\n".join(rules) + "\n"


_SHAPES: Final = files("esper.karn.drawing").joinpath("shapes.css").read_text(encoding="utf-8")
STYLE: Final = css_variables() + _SHAPES + _coloured()
"""Stylesheet that every page with a chart must include."""


def numeric_columns(rows: Sequence[Sequence[str]]) -> list[bool]:
    """Return for each column of a table whether it contains only numbers; such columns are right-aligned."""
    return [all(_NUMBER.fullmatch(cell) for cell in column) for column in zip(*rows, strict=True)]


def series_table(
    found: Series, text: Text, texts: Mapping[str, Text] = MappingProxyType({})
) -> tuple[list[str], list[list[str]]]:
    """Return the column names and the rows of a table of all series. The function ``texts[name]`` formats the
    numbers of the series ``name``; ``text`` formats all other numbers.
    """
    cells = [map(texts.get(name, text), values) for name, values in found.values.items()]
    rows = [[str(bin_), *row] for bin_, *row in zip(found.bins, *cells, strict=True)]
    return [found.axis, *found.values], rows


@dataclass(frozen=True, slots=True)
class Picture:
    """Chart as SVG, with a caption, and a table of the same numbers; the table is empty if the page of the
    chart has these numbers in another table.
    """

    svg: str
    columns: list[str]
    rows: list[list[str]]
    caption: str

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"every row of the table needs {len(self.columns)} cells: {self.columns}")

    def standalone(self) -> str:
        """Return the chart with its stylesheet, as the content of an SVG file."""
        opening, mark, rest = self.svg.partition(">")
        return opening + mark + element("style", STYLE) + rest

    _repr_svg_ = standalone  # Jupyter displays an object by its method _repr_svg_.


class Figure(NamedTuple):
    """Chart that answers one question about a run: a function that computes its numbers, and a function that
    draws them.
    """

    key: str
    question: str
    ask: Callable[..., Any]
    """Function that returns the numbers of the chart for a run, or for one of its episodes; None if there are
    no numbers.
    """
    draw: Callable[[Any, Any], Picture]
    """Function that draws the numbers of a run. The second argument of this function has the numbers of
    another run, or None; if given, the axes cover both runs.
    """

    def answer(
        self, run: Run, episode: EpisodeKey | None = None, compared: Run | None = None
    ) -> Picture | None:
        """Compute and draw the chart of a run or of one episode; None if there are no numbers."""
        found = self.ask(run) if episode is None else self.ask(run, episode)
        if found is None:
            return None
        other = None if compared is None else self.ask(compared)
        if getattr(other, "axis", None) != getattr(found, "axis", None):
            # Two charts have a common axis only if both are over epochs or both are over iterations.
            other = None
        return self.draw(found, other)
