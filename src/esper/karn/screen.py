"""A run as one terminal screen: state in, text out, with nothing drawn from anywhere else.

Score, twin and slots share one x-axis, the epochs of the present life. Colour means stage only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, TypeVar

from rich.text import Text

from esper.karn import notation
from esper.karn.following import Following, LifeState, SlotState
from esper.karn.lines import describe
from esper.karn.palette import LOOKS
from esper.leyline.stages import Stage

V = TypeVar("V")

_NAME_WIDTH: Final = 6
_LABEL_WIDTH: Final = 19
"""Everything left of the x-axis: a name and a stage, or a name and a number."""
_TAIL_WIDTH: Final = 41
"""Everything right of it: a gap, blueprint 14, alpha 5, contribution 13, parameters 8."""
_MAX_STRETCH: Final = 4
"""Columns per epoch, at most; wider would look like less was going on."""
_MAX_BAR: Final = 40
_MIN_EVENTS: Final = 3
_MAX_EVENTS: Final = 12
_EVENTS: Final = frozenset({Stage.GERMINATED, Stage.FOSSILIZED, Stage.PRUNED})


def render(state: Following, width: int, height: int) -> Text:
    """The screen, at most ``width`` columns wide and ``height`` lines high."""
    lines = [_header(state, width)]
    if state.life is not None:
        axis = _axis(state.max_epochs, width - _LABEL_WIDTH - _TAIL_WIDTH)
        lines += _numbers(state, state.life, axis)
        room = height - len(lines) - 3
        lines += _slots(state, state.life, axis, max(room - _MIN_EVENTS, 1))
        lines += _events(state, state.life, min(height - len(lines) - 1, _MAX_EVENTS))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines[:height])


def _header(state: Following, width: int) -> Text:
    """Which run, how far, how long, how much longer; what does not fit goes, the run's name first."""
    life = state.life
    name = f"  {state.run.task} · {state.run.decider}" if state.run is not None else ""
    if life is None:
        return Text(" esper").append(name)
    if life.episode:
        name += f" · life {life.episode}"
    total = state.max_epochs
    progress = f"  epoch {life.epoch:>{len(str(total))}}/{total}  "
    times = f"{notation.clock(state.elapsed)}  left {notation.clock(state.left)}"
    if len(" esper" + name + progress + times) > width:
        name = ""
    room = min(width - len(" esper" + name + progress + times) - 2, _MAX_BAR)
    filled = room * min(life.epoch, total) // max(total, 1)
    bar = Text("━" * filled).append("─" * (room - filled) + "  ", style="dim") if room > 0 else Text()
    return Text.assemble((" esper", "bold"), name, progress, bar, times)


def _axis(max_epochs: int, room: int) -> list[range]:
    """The epochs that each column stands for: several columns per epoch, or several epochs per column."""
    room = max(room, 1)
    if max_epochs <= room:
        stretch = min(room // max(max_epochs, 1), _MAX_STRETCH)
        return [range(epoch, epoch + 1) for epoch in range(1, max_epochs + 1) for _ in range(stretch)]
    edges = [column * max_epochs // room for column in range(room + 1)]
    return [range(start + 1, end + 1) for start, end in pairwise(edges)]


def _last(values: Mapping[int, V], epochs: range) -> V | None:
    return next((values[epoch] for epoch in reversed(epochs) if epoch in values), None)


def _numbers(state: Following, life: LifeState, axis: Sequence[range]) -> list[Text]:
    latest = life.latest
    score = latest.val_score if latest else None
    twin = latest.twin_score if latest else None
    known = [*life.scores.values(), *life.twin_scores.values()]
    low, high = min(known, default=0.0), max(known, default=0.0)
    score_line = notation.sparkline([_last(life.scores, epochs) for epochs in axis], low, high)
    twin_line = notation.sparkline([_last(life.twin_scores, epochs) for epochs in axis], low, high)
    best = f"  best {notation.points(life.best_score)}"
    lead = f"  {notation.gain(notation.difference(score, twin))} over the twin"
    params = latest.params if latest else None
    host_params = latest.params - latest.grown_params if latest else None
    train, val = (latest.train_loss, latest.val_loss) if latest else (None, None)
    ops = "  ".join(f"{state.op_name(op)} {times}" for op, times in sorted(life.ops.items()))
    return [
        Text(""),
        _labelled("score", notation.points(score)).append(score_line + best),
        _labelled("twin", notation.points(twin)).append(twin_line, style="dim").append(lead),
        _labelled("loss", notation.points(train, 3)).append(
            f"training, {notation.points(val, 3)} validation"
        ),
        _labelled("params", notation.count(params)).append(
            f"{notation.factor(params, host_params)} the host's {notation.count(host_params)}"
        ),
        _labelled("ops", f"{life.refused} refused").append(ops),
    ]


def _labelled(name: str, value: str) -> Text:
    return Text(f" {name:<{_NAME_WIDTH}}").append(f"{value:>10}  ")


def _slots(state: Following, life: LifeState, axis: Sequence[range], room: int) -> list[Text]:
    heading = (
        f"{'':<{_LABEL_WIDTH}}{'':<{len(axis)}} {'seed':<14}{'alpha':>5}{'contribution':>13}{'params':>8}"
    )
    shown = life.slots if len(life.slots) <= room else life.slots[: max(room - 1, 0)]
    lines = [Text(""), Text(heading, style="dim")]
    lines += [_slot_line(state.slot_name(index), slot, state, axis) for index, slot in enumerate(shown)]
    if len(shown) < len(life.slots):
        lines.append(Text(f" and {len(life.slots) - len(shown)} more slots", style="dim"))
    return lines


def _slot_line(name: str, slot: SlotState, state: Following, axis: Sequence[range]) -> Text:
    line = Text(f" {name:<{_NAME_WIDTH}}")
    line.append(f" {slot.stage.name.lower():<11}", style=LOOKS[slot.stage].colour)
    for epochs in axis:
        stage = Stage.PRUNED if Stage.PRUNED in map(slot.lane.get, epochs) else _last(slot.lane, epochs)
        look = None if stage is None else LOOKS[stage]
        line.append(look.glyph if look else " ", style=look.colour if look else "")
    seed = notation.UNKNOWN if slot.blueprint is None else state.blueprint_name(slot.blueprint)
    contribution = notation.gain_with_error(slot.contribution, slot.contribution_error)
    return line.append(
        f" {seed:<14}{notation.points(slot.alpha, 2):>5}{contribution:>13}{notation.count(slot.params):>8}"
    )


def _events(state: Following, life: LifeState, room: int) -> list[Text]:
    """The latest events, newest last."""
    rows = [row for row in life.transitions if Stage(row.to_stage) in _EVENTS][-max(room, 0) :]
    lines = [Text("")] if rows and room > 0 else []
    for row in rows[: max(room, 0)]:
        line = Text(f" {row.epoch:>{len(str(state.max_epochs))}}  ")
        look = LOOKS[Stage(row.to_stage)]
        lines.append(line.append(f"{look.glyph} ", style=look.colour).append(describe(row, state)))
    return lines
