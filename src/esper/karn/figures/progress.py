"""Alive, how far, when done: one line over a thin bar."""

from __future__ import annotations

from esper.karn import notation
from esper.karn.figures import svg
from esper.karn.figures.picture import Picture
from esper.karn.questions.episodes import EpisodeKey
from esper.karn.questions.progress import Progress, progress
from esper.karn.run import Run


def progress_picture(run: Run, episode: EpisodeKey | None = None) -> Picture:
    """The answer of the whole run, whichever episode is looked at."""
    return draw_progress(progress(run))


def progress_line(found: Progress) -> str:
    """The header line of every view."""
    total = "" if found.total is None else f"/{notation.count(found.total)}"
    parts = [
        f"{found.task} · {found.controller}",
        found.state,
        f"{found.unit} {notation.count(found.done)}{total}",
        notation.clock(found.seconds),
    ]
    if found.state == "running":
        parts.append(f"left {notation.clock(found.seconds_left)}")
    parts.append(f"{notation.significant(found.steps_per_second)} steps/s")
    return " · ".join(parts)


def draw_progress(found: Progress) -> Picture:
    """The line, and a bar of what is done."""
    share = found.share
    bar = [svg.rectangle(0, 12, svg.WIDTH, 6, "track")]
    if share:
        bar.append(svg.rectangle(0, 12, svg.WIDTH * share, 6, "done"))
    line = progress_line(found)
    return Picture(
        svg=svg.drawing(30, "Progress", line, *bar),
        columns=["run", "task", "controller", "state", found.unit, "of", "time", "left", "steps/s"],
        rows=[
            [
                found.name,
                found.task,
                found.controller,
                found.state,
                notation.count(found.done),
                notation.count(found.total),
                notation.clock(found.seconds),
                notation.clock(found.seconds_left),
                notation.significant(found.steps_per_second),
            ]
        ],
        caption=line,
    )
