"""Puts sections of a screen below and beside each other within the lines that there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Final, Self

from rich.cells import cell_len
from rich.text import Text

GAP: Final = 2
"""Columns between two sections that stand side by side."""
LABEL: Final = 9
"""Columns of a line's label, with the blank before it."""
VALUE: Final = 8
"""Columns of a line's number."""
COURSE_AT: Final = LABEL + VALUE + 2
"""Where lanes and courses of an episode begin: after a label, a number and a gap."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the screen that answers one question, in as many lines as it is given."""

    draw: Callable[[int], Sequence[Text]]
    """At most so many lines; asked for one or more."""
    least: int = 0
    """Lines without which the screen would not answer its question."""
    wish: int = 0
    """Lines that it gets before sections are set apart by blank ones."""
    most: int = 0
    """Lines that it can fill on a high screen."""
    start: int = 1
    """Fewer lines than these would not be worth it."""
    joined: bool = False
    """It goes with the section before it, and needs no blank line between them."""

    @classmethod
    def of(cls, lines: Sequence[Text], least: int = 0) -> Self:
        """Lines of which the first ones matter most."""
        return cls(lambda room: lines[:room], min(least, len(lines)), len(lines), len(lines))

    @classmethod
    def either(
        cls, short: Sequence[Text], long: Sequence[Text], least: int = 0, *, joined: bool = False
    ) -> Self:
        """Few lines, or many that say more where there is room for all of them; ``long`` may be empty."""
        return cls(
            lambda room: long if 0 < len(long) <= room else short[:room],
            least=min(least, len(short)),
            wish=len(short),
            most=max(len(long), len(short)),
            start=len(long),
            joined=joined,
        )

    @classmethod
    def extra(cls, lines: Sequence[Text]) -> Self:
        """Lines for a screen on which everything else has found its place."""
        return cls(lambda room: lines[:room], most=len(lines))


def stack(sections: Sequence[Section], height: int) -> list[Text]:
    """Sections below each other, set apart where there is room; where it is short the first come first."""
    rooms = _rooms(sections, height)
    drawn = [(s, s.draw(room)) for s, room in zip(sections, rooms, strict=True) if room > 0]
    spare = height - sum(len(part) for _, part in drawn)
    gaps = set(range(1, len(drawn)))
    if len(gaps) > spare:
        gaps = {index for index in gaps if not drawn[index][0].joined}
    lines: list[Text] = []
    for index, (_, part) in enumerate(drawn):
        if index in gaps and len(gaps) <= spare:
            lines.append(Text())
        lines += part
    return lines


def _rooms(sections: Sequence[Section], height: int) -> list[int]:
    """Lines for each section: what it needs, then what it wishes for, then what it can fill beside blanks."""
    rooms = [0] * len(sections)
    for index, section in enumerate(sections):
        rooms[index] = max(min(section.least, height - sum(rooms)), 0)
    for index, section in enumerate(sections):
        rooms[index] += max(min(section.wish - rooms[index], height - sum(rooms)), 0)
    for index, section in enumerate(sections):
        blanks = sum(room > 0 for room in rooms) - (rooms[index] > 0)
        spare = height - sum(rooms) - blanks
        if rooms[index] + spare >= section.start:
            rooms[index] += max(min(section.most - rooms[index], spare), 0)
    return rooms


def beside(left: Sequence[Text], right: Sequence[Text], column: int) -> list[Text]:
    """Two stacks of lines side by side, the left one ``column`` columns wide."""
    return [
        Text.assemble(fitted(first or Text(), column), " " * GAP, second or Text())
        for first, second in zip_longest(left, right)
    ]


def fitted(line: Text, width: int) -> Text:
    """The line in exactly ``width`` columns."""
    line = line.copy()
    line.truncate(width, overflow="ellipsis", pad=True)
    return line


def joined(cells: Iterable[tuple[str, str]]) -> Text:
    """Characters with their styles as one text; neighbours that look the same are one piece of it."""
    alike = groupby(cells, key=lambda cell: cell[1])
    return Text.assemble(*(("".join(character for character, _ in group), style) for style, group in alike))


def labelled(label: str, *parts: Text | str | tuple[str, str]) -> Text:
    """A line whose first columns name it."""
    return Text.assemble(f" {label:<{LABEL - 1}}", *parts)


def flow(label: str, cells: Sequence[Text], width: int, *, cell: int = 1, gap: int = 2) -> list[Text]:
    """Cells of ``cell`` columns in as many lines as they need; a longer one takes the place of two."""
    lines: list[Text] = []
    line, used = labelled(label), LABEL
    for content in cells:
        size = cell_len(content.plain)
        if used > LABEL and used + size > width:
            lines.append(line)
            line, used = labelled(""), LABEL
        line.pad_right(used - cell_len(line.plain))
        line.append_text(content)
        used += -(-(size + gap) // cell) * cell
    return [*lines, line]
