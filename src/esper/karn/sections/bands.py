"""Where a column's healthy values lie, and how a value looks that left them: dim inside, bright outside."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

from rich.text import Text

from esper.karn import notation
from esper.leyline.columns import COLUMNS, TABLE_OF
from esper.leyline.events import Row

INSIDE: Final = "dim"
OUTSIDE: Final = "bold"


class Band(NamedTuple):
    """Edges of what is healthy; None: open."""

    low: float | None
    high: float | None

    def passed(self, value: float | None, shown: Callable[[float], str] = "{:g}".format) -> str:
        """The edge that ``value`` is beyond, as ``>0.3``; empty where it is healthy or unknown."""
        if value is not None and self.high is not None and value > self.high:
            return f">{shown(self.high)}"
        if value is not None and self.low is not None and value < self.low:
            return f"<{shown(self.low)}"
        return ""


class Reading(NamedTuple):
    """A number beside the band of its column."""

    value: Text
    """Dim within its band, bright beyond."""
    limit: str
    """The edge it is beyond; empty where it is healthy, unknown, or has no band."""

    @property
    def text(self) -> Text:
        """Both, one after the other."""
        return Text.assemble(self.value, (f" {self.limit}", OUTSIDE) if self.limit else "")

    def named(self, name: str) -> Text:
        """The same after its name, which is as dim as a healthy number."""
        return Text.assemble((f"{name} ", INSIDE if self.value.style == INSIDE else ""), self.text)


@cache
def band(row_type: type[Row], column: str) -> Band:
    """The band of a column, as its row type declares it."""
    (found,) = (spec for spec in COLUMNS[TABLE_OF[row_type]] if spec.name == column)
    return Band(found.low, found.high)


def read(
    value: float | None,
    row_type: type[Row],
    column: str,
    shown: Callable[[float | None], str] = notation.tabular,
) -> Reading:
    """A value of a column, written by ``shown`` and judged by the column's band."""
    limits = band(row_type, column)
    limit = limits.passed(value, "{:g}".format if shown is not notation.share else notation.share)
    if value is None or limits == (None, None):
        return Reading(Text(shown(value)), "")
    return Reading(Text(shown(value), style=OUTSIDE if limit else INSIDE), limit)
