"""The episodes of the last iteration of a training: all of them in a line each, and which one the lanes show."""

from __future__ import annotations

from typing import Final

from rich.text import Text

from esper.karn import notation
from esper.karn.episode_state import EpisodeState
from esper.karn.following import Following
from esper.karn.palette import LOOKS
from esper.karn.sections.bands import OUTSIDE
from esper.karn.sections.lanes import MIN_LANE
from esper.karn.sections.layout import LABEL, Section, flow, labelled
from esper.karn.sections.policy import CELL
from esper.leyline.events import EpisodeRow, RunRow

_TABLE: Final = 34
"""Columns of an episode's numbers."""
_FEWEST: Final = 4
"""Lines for which the table is worth its room."""


def episode_title(state: Following) -> Text:
    """Which episode of the last iteration the lanes show."""
    episode = state.episode
    if episode is None:
        missing = "no finished episode to show" if state.iterations else "the first iteration is under way"
        return labelled("slots", Text(missing, style="dim"))
    number = state.iterations[-1].row.iteration
    text = f"best of iteration {number}: environment {episode.env}"
    if state.env is not None:
        text = f"iteration {number}: environment {episode.env}"
    if episode.result is None:
        return labelled("slots", text)
    paid, score = notation.gain(episode.result.total_reward, 2), notation.points(episode.result.val_score)
    twin = notation.points(episode.result.twin_val_score)
    return labelled("slots", f"{text}, return {paid}, score {score}, twin {twin}")


def episodes(state: Following, run: RunRow, width: int) -> Section:
    """Every episode of the last iteration in a line."""
    columns = max(min(width - LABEL - _TABLE - len(run.slots) - 4, run.horizon), MIN_LANE)
    span = notation.shared_scale([score for episode in state.episodes for score in episode.scores.values()])

    def draw(room: int) -> list[Text]:
        heading = f"{'score':>7}{'twin':>7}{'return':>8}{'params':>9}   {'epochs':<{columns}}  slots"
        lines = [labelled("episodes", Text(heading, style="dim"))]
        shown = len(state.episodes) if len(state.episodes) < room else room - 2
        lines += [_episode_line(episode, run, columns, span) for episode in state.episodes[: max(shown, 0)]]
        if shown < len(state.episodes):
            lines.append(labelled("", Text(f"and {len(state.episodes) - shown} more", style="dim")))
        return lines[:room]

    return Section(draw, most=len(state.episodes) + 1 if state.episodes else 0, start=_FEWEST)


def _episode_line(episode: EpisodeState, run: RunRow, columns: int, span: tuple[float, float]) -> Text:
    scores = [episode.scores.get(epoch) for epoch in range(1, run.horizon + 1)]
    course = notation.trend(scores, columns, *span)
    line = labelled(f"env {episode.env}", _episode_numbers(episode.result), f"   {course:<{columns}}  ")
    for slot in episode.slots:
        look = LOOKS[slot.stage]
        line.append(look.glyph, style=look.colour)
    if episode.result is not None and episode.result.ended_by != "horizon":
        line.append(f"  ended by the {episode.result.ended_by}", style=OUTSIDE)
    return line


def _episode_numbers(end: EpisodeRow | None) -> str:
    score, twin, paid, params = notation.UNKNOWN, notation.UNKNOWN, notation.UNKNOWN, notation.UNKNOWN
    if end is not None:
        score, twin = notation.points(end.val_score), notation.points(end.twin_val_score)
        paid, params = notation.gain(end.total_reward, 2), notation.count(end.params)
    return f"{score:>7}{twin:>7}{paid:>8}{params:>9}"


def phases(state: Following, width: int) -> Section:
    """Where the time of the last iteration went."""
    spent = state.iterations[-1].row.phase_ms if state.iterations else {}
    cells = [Text(f"{name} {notation.duration(ms)}") for name, ms in spent.items()]
    return Section.extra(flow("time", cells, width, cell=CELL, gap=1) if cells else [])
