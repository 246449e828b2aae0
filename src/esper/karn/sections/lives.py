"""The lives of the last round of a training: all of them in a line each, and which one the lanes show."""

from __future__ import annotations

from typing import Final

from rich.text import Text

from esper.karn import notation
from esper.karn.following import Following
from esper.karn.life_state import LifeState
from esper.karn.palette import LOOKS
from esper.karn.sections.bands import OUTSIDE
from esper.karn.sections.lanes import MIN_LANE
from esper.karn.sections.layout import LABEL, Section, flow, labelled
from esper.karn.sections.policy import CELL
from esper.leyline.events import EpisodeRow, RunRow

_TABLE: Final = 34
"""Columns of a life's numbers."""
_FEWEST: Final = 4
"""Lines for which the table is worth its room."""


def life_title(state: Following) -> Text:
    """Which life of the last round the lanes show."""
    life = state.life
    if life is None:
        missing = "no finished life to show" if state.rounds else "the first round is under way"
        return labelled("slots", Text(missing, style="dim"))
    number = state.rounds[-1].row.round
    text = f"best of round {number}: environment {life.env}"
    if state.env is not None:
        text = f"round {number}: environment {life.env}"
    if life.result is None:
        return labelled("slots", text)
    paid, score = notation.gain(life.result.total_reward, 2), notation.points(life.result.val_score)
    twin = notation.points(life.result.twin_val_score)
    return labelled("slots", f"{text}, return {paid}, score {score}, twin {twin}")


def lives(state: Following, run: RunRow, width: int) -> Section:
    """Every life of the last round in a line."""
    columns = max(min(width - LABEL - _TABLE - len(run.slots) - 4, run.horizon), MIN_LANE)
    span = notation.shared_scale([score for life in state.lives for score in life.scores.values()])

    def draw(room: int) -> list[Text]:
        heading = f"{'score':>7}{'twin':>7}{'return':>8}{'params':>9}   {'epochs':<{columns}}  slots"
        lines = [labelled("lives", Text(heading, style="dim"))]
        shown = len(state.lives) if len(state.lives) < room else room - 2
        lines += [_life_line(life, run, columns, span) for life in state.lives[: max(shown, 0)]]
        if shown < len(state.lives):
            lines.append(labelled("", Text(f"and {len(state.lives) - shown} more", style="dim")))
        return lines[:room]

    return Section(draw, most=len(state.lives) + 1 if state.lives else 0, start=_FEWEST)


def _life_line(life: LifeState, run: RunRow, columns: int, span: tuple[float, float]) -> Text:
    scores = [life.scores.get(epoch) for epoch in range(1, run.horizon + 1)]
    course = notation.trend(scores, columns, *span)
    line = labelled(f"env {life.env}", _life_numbers(life.result), f"   {course:<{columns}}  ")
    for slot in life.slots:
        look = LOOKS[slot.stage]
        line.append(look.glyph, style=look.colour)
    if life.result is not None and life.result.ended_by != "horizon":
        line.append(f"  ended by the {life.result.ended_by}", style=OUTSIDE)
    return line


def _life_numbers(end: EpisodeRow | None) -> str:
    score, twin, paid, params = notation.UNKNOWN, notation.UNKNOWN, notation.UNKNOWN, notation.UNKNOWN
    if end is not None:
        score, twin = notation.points(end.val_score), notation.points(end.twin_val_score)
        paid, params = notation.gain(end.total_reward, 2), notation.count(end.params)
    return f"{score:>7}{twin:>7}{paid:>8}{params:>9}"


def phases(state: Following, width: int) -> Section:
    """Where the time of the last round went."""
    spent = state.rounds[-1].row.phase_ms if state.rounds else {}
    cells = [Text(f"{name} {notation.duration(ms)}") for name, ms in spent.items()]
    return Section.extra(flow("time", cells, width, cell=CELL, gap=1) if cells else [])
