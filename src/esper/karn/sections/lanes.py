"""What does the network look like: a lane per slot over the epochs of one episode, and what each slot holds.

Colour means stage. Whatever else is shown over the epochs of an episode shares the axis of its lanes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeVar

from rich.text import Text

from esper.karn import notation
from esper.karn.episode_state import EpisodeState, SlotState
from esper.karn.lines import op_label
from esper.karn.palette import LOOKS
from esper.karn.sections.bands import OUTSIDE, read
from esper.karn.sections.layout import COURSE_AT, Section, joined
from esper.leyline.events import DecisionRow, RunRow, SeedRow
from esper.leyline.factored_actions import Head, LifecycleOp
from esper.leyline.stages import Stage

V = TypeVar("V")

NARROW: Final = 60
"""Below so many columns a lane stands beside the slot's name, without the name of its stage."""
MAX_STRETCH: Final = 4
"""Columns per epoch, at most; wider would look like less was going on."""
MIN_LANE: Final = 20
MIN_SLOTS: Final = 8
"""Slots that are shown before other sections get more than their least."""
_NAME: Final = 7


@dataclass(frozen=True, slots=True)
class Axis:
    """Where lanes begin, and the epochs that each of their columns stands for."""

    start: int
    columns: Sequence[range]


def axis_of(horizon: int, start: int, room: int) -> Axis:
    """Several columns per epoch, or several epochs per column."""
    room = max(room, 1)
    if horizon <= room:
        stretch = min(room // max(horizon, 1), MAX_STRETCH)
        return Axis(
            start, [range(epoch, epoch + 1) for epoch in range(1, horizon + 1) for _ in range(stretch)]
        )
    edges = [column * horizon // room for column in range(room + 1)]
    return Axis(start, [range(first + 1, last + 1) for first, last in pairwise(edges)])


def last_of(values: Mapping[int, V], epochs: range) -> V | None:
    """What is known of the latest of these epochs."""
    return next((values[epoch] for epoch in reversed(epochs) if epoch in values), None)


@dataclass(frozen=True, slots=True)
class SlotColumn:
    """One column of the table beside the lanes."""

    heading: str
    width: int


SEED: Final = SlotColumn("seed", 15)
CONTRIBUTION: Final = SlotColumn("contribution", 13)
PARAMS: Final = SlotColumn("params", 8)
ALPHA: Final = SlotColumn("alpha", 5)
SHAPLEY: Final = SlotColumn("Shapley", 8)
HEALTH: Final = SlotColumn("health", 10)
_BY_IMPORTANCE: Final = (SEED, CONTRIBUTION, PARAMS, ALPHA, SHAPLEY, HEALTH)
_AS_SHOWN: Final = (SEED, ALPHA, CONTRIBUTION, SHAPLEY, PARAMS, HEALTH)


def lanes_of(run: RunRow, width: int) -> tuple[Axis, list[SlotColumn]]:
    """The axis of an episode in ``width`` columns, and the columns for which there is room beside it."""
    start = COURSE_AT if width >= NARROW else _NAME + 1
    room = width - start - max(MIN_LANE, min(run.horizon, width // 3))
    chosen = []
    for column in _BY_IMPORTANCE:
        if column.width > room:
            break
        chosen.append(column)
        room -= column.width
    table = sum(column.width for column in chosen)
    return axis_of(run.horizon, start, width - start - table), [c for c in _AS_SHOWN if c in chosen]


def slots(run: RunRow, episode: EpisodeState | None, width: int, title: Text | None = None) -> Section:
    """What the network looks like: one lane per slot, and what it holds."""
    axis, columns = lanes_of(run, width)
    states = episode.slots if episode else [SlotState() for _ in run.slots]
    above = [_heading(axis, columns)] if title is None else [title, _heading(axis, columns)]

    def draw(room: int) -> list[Text]:
        lines = above[: max(room - 1, 0)]
        places = room - len(lines)
        shown = len(states) if len(states) <= places else places - 1
        lines += [_slot_line(run, index, states[index], axis, columns) for index in range(shown)]
        if shown < len(states):
            lines.append(Text(f" and {len(states) - shown} more slots", style="dim"))
        if len(lines) < room and episode is not None:
            lines.append(_decided(episode, axis))
        return lines

    full = len(above) + len(states)
    return Section(draw, len(above) + min(len(states), MIN_SLOTS), full, full + (episode is not None))


def _heading(axis: Axis, columns: Sequence[SlotColumn]) -> Text:
    room = len(axis.columns)
    last = axis.columns[-1][-1]
    text = f"epochs 1–{last}"
    names = "".join(_cell(column, column.heading) for column in columns)
    return Text(f"{'':<{axis.start}}{text[:room]:<{room}}{names}", style="dim")


def _cell(column: SlotColumn, text: str) -> str:
    return f" {text:<{column.width - 1}}" if column is SEED else f"{text:>{column.width}}"


def _slot_line(run: RunRow, index: int, slot: SlotState, axis: Axis, columns: Sequence[SlotColumn]) -> Text:
    line = Text(f" {run.slots[index]:<{_NAME - 1}} "[: _NAME + 1])
    if axis.start > _NAME + 1:
        line.append(f"{slot.stage.name.lower():<{axis.start - _NAME - 1}}", style=LOOKS[slot.stage].colour)
    line.append_text(joined(_stage_cell(slot, epochs) for epochs in axis.columns))
    for column in columns:
        line.append_text(_slot_cell(run, slot, column))
    return line


def _stage_cell(slot: SlotState, epochs: range) -> tuple[str, str]:
    stage = Stage.PRUNED if Stage.PRUNED in map(slot.lane.get, epochs) else last_of(slot.lane, epochs)
    return (" ", "") if stage is None else (LOOKS[stage].glyph, LOOKS[stage].colour)


def _slot_cell(run: RunRow, slot: SlotState, column: SlotColumn) -> Text:
    if column is SEED:
        name = notation.UNKNOWN if slot.last_blueprint is None else run.blueprints[slot.last_blueprint]
        return Text(_cell(column, name), style="" if slot.blueprint is not None else "dim")
    if column is HEALTH:
        text = read(slot.gradient_health, SeedRow, "gradient_health").text
        return Text.assemble(" " * max(column.width - len(text), 0), text)
    shown = {
        ALPHA: notation.points(slot.alpha, 2),
        CONTRIBUTION: notation.gain_with_error(slot.contribution, slot.contribution_error),
        SHAPLEY: notation.gain(slot.shapley),
        PARAMS: notation.count(slot.params),
    }[column]
    return Text(_cell(column, shown))


def _decided(episode: EpisodeState, axis: Axis) -> Text:
    """The op before each epoch by its first letter, a dot for waiting, small where it was refused."""
    line = Text.assemble((f" {'decided':<{axis.start - 1}}"[: axis.start], "dim"))
    line.append_text(joined(_decision_cell(last_of(episode.decisions, epochs)) for epochs in axis.columns))
    return line.append(" small: refused", style="dim") if episode.refused else line


def _decision_cell(row: DecisionRow | None) -> tuple[str, str]:
    if row is None:
        return " ", ""
    op = LifecycleOp(row.action[Head.OP])
    letter = op_label(op.name)[0]
    if op is LifecycleOp.WAIT:
        return "·", "dim"
    return (letter.upper(), "") if row.succeeded else (letter, OUTSIDE)
