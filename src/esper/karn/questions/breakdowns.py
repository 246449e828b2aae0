"""Charts of stacked columns: shares of chosen ops, mean reward terms per iteration, mean time per phase."""

from dataclasses import replace
from functools import partial
from typing import Final

from esper.karn import notation
from esper.karn.drawing.chart import Chart, ChartData, Panel, draw
from esper.karn.drawing.picture import Picture, part_look, series_table
from esper.karn.palette import op_look
from esper.karn.questions.series import Series, query_series
from esper.karn.run import Run
from esper.karn.statistics import mean
from esper.leyline.stages import Stage

DECISIONS: Final = "decisions"
FORCED: Final = "forced"
"""Name of the series with the share of forced decisions (one legal action). The series "WAIT forced" has the
share of forced WAIT decisions among all decisions.
"""
FAILED: Final = "failed"
SUM: Final = "return"
_signed = partial(notation.gain, decimals=3)


# --- chosen ops -----------------------------------------------------------------------------------


def choices(run: Run) -> Series | None:
    """Return the number of decisions and the share of each op among all decisions; None if there are no
    decisions.
    """
    ops = run.row.ops
    op = f"action[{run.row.heads.index('op') + 1}]"
    conditions = {name: f"{op} = {index}" for index, name in enumerate(ops)}
    conditions |= {f"{name} {FORCED}": f"forced AND {op} = {index}" for index, name in enumerate(ops)}
    conditions |= {FORCED: "forced", FAILED: "NOT succeeded"}
    shares = {name: f"count(*) FILTER ({which}) / count(*)" for name, which in conditions.items()}
    # A decision precedes the epoch that it affects; an additional decision may follow the last epoch.
    epoch = "epoch + 1" if run.row.horizon is None else f"least(epoch + 1, {run.row.horizon})"
    position = "iteration" if run.is_training else epoch
    found = query_series(run, "decision", {DECISIONS: "count(*)", **shares}, position=position)
    if found is not None or not run.is_training:
        return found
    # If there are no decision rows, the shares of ops are computed from the op counts in episode rows.
    total = "nullif(sum(list_sum(op_counts)), 0)"
    shares = dict.fromkeys(shares, "NULL")
    shares |= {name: f"sum(op_counts[{index + 1}]) / {total}" for index, name in enumerate(ops)}
    return query_series(run, "episode", {DECISIONS: total, **shares})


def ops_of(found: Series) -> list[str]:
    """Return the names of the series that are shares of ops among decisions."""
    return [name for name in found.values if f"{name} {FORCED}" in found.values]


def op_name(op: str) -> str:
    """Return a readable name of an op, short enough for a label."""
    return op.lower().replace("_", " ").removesuffix(" target")


def choices_chart(found: Series) -> Chart:
    """Return the chart of the share of each op; forced decisions are striped, failed decisions are in a panel
    above the ops.
    """
    parts = []
    for op in ops_of(found):
        total, forced = _overall(found, op), found[f"{op} {FORCED}"]
        parts.append(
            ChartData(op_name(op), found[op], notation.share, _look(op), total=total, striped=forced)
        )
    failed = ChartData(FAILED, found[FAILED], notation.share, "error", total=_overall(found, FAILED))
    ops = {name: op_name(name) for name in ops_of(found)}
    shown = {ops.get(name, name): found[name] for name in (DECISIONS, *ops, FORCED, FAILED)}
    legend = "Striped: nothing but waiting was legal. Above: what failed."
    if found.last(FORCED) is None:
        legend = "Decisions were not recorded one by one: forced and failed are unknown."
    return Chart(
        title="Mix of ops",
        description=", ".join(f"{part.name} {notation.share(part.total)}" for part in parts if part.total),
        found=found,
        panels=[
            Panel(16, parts=[failed], zero=True, optional=True, ticks=1, unit_size=0.01),
            Panel(170, parts=parts, zero=True, most=1.0, ticks=2, unit="%", unit_size=0.01),
        ],
        table=series_table(replace(found, values=shown), notation.share, {DECISIONS: notation.count}),
        caption=f"Shares of all decisions. {legend}",
        room=168,
    )


def _overall(found: Series, name: str) -> float:
    """Return the share of an op, or of failed decisions, among all decisions of a run."""
    counts = [count or 0.0 for count in found[DECISIONS]]
    chosen = sum(count * (share or 0.0) for count, share in zip(counts, found[name], strict=True))
    return chosen / (sum(counts) or 1.0)


def _look(op: str) -> str:
    stage = op_look(op).stage
    return "idle" if stage is Stage.DORMANT else stage.name.lower()


# --- reward terms ---------------------------------------------------------------------------------


def reward(run: Run) -> Series | None:
    """Return the mean reward terms and their sum per iteration; None if the run has no rewards."""
    names = "SELECT DISTINCT unnest(map_keys(reward_terms)) AS term FROM update ORDER BY term"
    terms = [name for (name,) in run.fetch(names) if name != SUM]
    columns = dict.fromkeys(terms, "avg(reward_terms[?])") | {SUM: "avg(mean_return)"}
    table = "update WHERE reward_terms IS NOT NULL"
    return query_series(run, table, columns, position="iteration", parameters=terms)


def reward_chart(found: Series) -> Chart:
    """Return the chart of the reward terms as stacked columns, and of their sum as a line."""
    terms = [name for name in found.values if name != SUM]
    parts = [ChartData(name, found[name], _signed, part_look(index)) for index, name in enumerate(terms)]
    return Chart(
        title="Reward terms",
        description=", ".join(f"{name} {_signed(found.last(name))}" for name in terms),
        found=found,
        panels=[Panel(180, [ChartData(SUM, found[SUM], _signed, "thin")], parts=parts, zero=True)],
        table=series_table(found, _signed),
        caption="Mean reward terms per episode; line: their sum.",
        room=190,
    )


# --- time by phase --------------------------------------------------------------------------------


def times(run: Run) -> Series | None:
    """Return the mean milliseconds per phase of an epoch or iteration, the longest phase first; None if no
    time was recorded.
    """
    table = "update" if run.is_training else "epoch"
    entries = f"SELECT unnest(map_keys(phase_ms)) AS phase, unnest(map_values(phase_ms)) AS ms FROM {table}"
    named = run.fetch(f"SELECT phase FROM ({entries}) GROUP BY phase ORDER BY sum(ms) DESC, phase")
    phases = [phase for (phase,) in named]
    columns = dict.fromkeys(phases, "avg(phase_ms[?])")
    return query_series(run, table, columns, parameters=phases) if phases else None


def draw_times(found: Series, compared: Series | None = None) -> Picture:
    """Draw the time per phase as one stacked column per iteration or epoch, in seconds or milliseconds."""
    held = [
        value or 0.0 for one in (found, compared) if one for course in one.values.values() for value in course
    ]
    unit, size = ("s", 1000.0) if max(held) >= 1000 else ("ms", 1.0)
    return draw(partial(_times_chart, unit=unit, size=size), found, compared)


def _times_chart(found: Series, unit: str, size: float) -> Chart:
    parts = [
        ChartData(name, spent, notation.duration, part_look(index), total=mean(spent))
        for index, (name, spent) in enumerate(found.values.items())
    ]
    return Chart(
        title="Time by phase",
        description=", ".join(f"{part.name} {notation.duration(part.total)}" for part in parts),
        found=found,
        panels=[Panel(140, parts=parts, zero=True, ticks=3, unit=unit, unit_size=size)],
        table=series_table(found, notation.duration),
        caption=f"Mean time per {found.axis}; on the right, over the whole run.",
        room=190,
    )
