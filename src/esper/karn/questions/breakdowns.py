"""Mean reward terms per iteration, and mean time per phase, as stacked columns."""

from functools import partial
from typing import Final

from esper.karn import notation
from esper.karn.drawing.chart import Chart, ChartLine, Panel, StackedPart, draw
from esper.karn.drawing.picture import Picture, series_table
from esper.karn.drawing.style import part_look
from esper.karn.questions.episode_selection import is_training
from esper.karn.questions.series import Series, query_series
from esper.karn.run import Run
from esper.karn.statistics import mean

SUM: Final = "return"
_signed = partial(notation.gain, decimals=3)


def reward(run: Run) -> Series | None:
    """Return the mean reward terms and their sum per iteration; None without rewards."""
    names = "SELECT DISTINCT unnest(map_keys(reward_terms)) AS term FROM update ORDER BY term"
    terms = [name for (name,) in run.sql(names).fetchall() if name != SUM]
    columns = dict.fromkeys(terms, "avg(reward_terms[?])") | {SUM: "avg(mean_return)"}
    known = "reward_terms IS NOT NULL"
    return query_series(run, "update", columns, where=known, position="iteration", parameters=terms)


def draw_reward(found: Series, compared: Series | None = None) -> Picture:
    """Draw one column per iteration, and the sum as a line."""
    caption = "Mean reward terms per episode; line: their sum."
    return Picture(draw(_reward_chart, found, compared), *series_table(found, _signed), caption)


def _reward_chart(found: Series) -> Chart:
    terms = [name for name in found.values if name != SUM]
    parts = [StackedPart(name, found[name], _signed, part_look(index)) for index, name in enumerate(terms)]
    return Chart(
        title="Reward terms",
        description=", ".join(f"{name} {_signed(found.last(name))}" for name in terms),
        found=found,
        panels=[Panel(180, [ChartLine(SUM, found[SUM], _signed, "thin")], parts=parts, zero=True)],
        room=190,
    )


def times(run: Run) -> Series | None:
    """Return the mean milliseconds per phase, the longest phase first; None if no time was recorded."""
    table = "update" if is_training(run) else "epoch"
    named = run.sql(
        f"""
        SELECT phase, sum(ms) AS total
        FROM (SELECT unnest(map_keys(phase_ms)) AS phase, unnest(map_values(phase_ms)) AS ms FROM {table})
        GROUP BY phase ORDER BY total DESC, phase
        """
    ).fetchall()
    phases = [phase for phase, _ in named]
    return (
        query_series(run, table, dict.fromkeys(phases, "avg(phase_ms[?])"), parameters=phases)
        if phases
        else None
    )


def draw_times(found: Series, compared: Series | None = None) -> Picture:
    """Draw one column per iteration or epoch, in seconds or milliseconds."""
    held = [
        value or 0.0 for one in (found, compared) if one for course in one.values.values() for value in course
    ]
    unit, size = ("s", 1000.0) if max(held) >= 1000 else ("ms", 1.0)
    return Picture(
        draw(partial(_times_chart, unit=unit, size=size), found, compared),
        *series_table(found, notation.duration),
        f"Mean time per {found.axis}; on the right, over the whole run.",
    )


def _times_chart(found: Series, unit: str, size: float) -> Chart:
    def text(value: float | None) -> str:
        return notation.duration(None if value is None else value * size)

    parts = []
    for index, (name, course) in enumerate(found.values.items()):
        spent = [None if ms is None else ms / size for ms in course]
        parts.append(StackedPart(name, spent, text, part_look(index), total=mean(spent)))
    return Chart(
        title="Time by phase",
        description=", ".join(f"{part.name} {text(part.total)}" for part in parts),
        found=found,
        panels=[Panel(140, parts=parts, zero=True, ticks=3, unit=unit)],
        room=190,
    )
