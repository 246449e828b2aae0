"""Which terms make up the reward: their means per iteration, drawn as stacked columns."""

from functools import partial
from typing import Final

from esper.karn import notation
from esper.karn.drawing.chart import Chart, ChartLine, Panel, StackedPart, draw
from esper.karn.drawing.picture import Picture, series_table
from esper.karn.drawing.style import part_look
from esper.karn.questions.series import Series, query_series
from esper.karn.run import Run

SUM: Final = "return"
_text = partial(notation.gain, decimals=3)


def reward(run: Run) -> Series | None:
    """Terms by their names, and their sum; None: there were no rewards."""
    names = "SELECT DISTINCT unnest(map_keys(reward_terms)) AS term FROM update ORDER BY term"
    terms = [name for (name,) in run.sql(names).fetchall() if name != SUM]
    columns = dict.fromkeys(terms, "avg(reward_terms[?])") | {SUM: "avg(mean_return)"}
    known = "reward_terms IS NOT NULL"
    return query_series(run, "update", columns, where=known, place="iteration", parameters=terms)


def draw_reward(found: Series, beside: Series | None = None) -> Picture:
    """One column per iteration, and the sum as a line."""
    caption = "Mean reward terms per episode; line: their sum."
    return Picture(draw(_chart, found, beside), *series_table(found, _text), caption)


def _chart(found: Series) -> Chart:
    terms = [name for name in found.values if name != SUM]
    parts = [StackedPart(name, found[name], _text, part_look(index)) for index, name in enumerate(terms)]
    return Chart(
        title="Reward terms",
        description=", ".join(f"{name} {_text(found.last(name))}" for name in terms),
        found=found,
        panels=[Panel(180, [ChartLine(SUM, found[SUM], _text, "thin")], parts=parts, zero=True)],
        room=190,
    )
