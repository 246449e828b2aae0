"""Ops chosen by the controller: shares of all ops, forced decisions, and failures.

Ops are drawn as stacked columns with forced decisions striped, failures above.
"""

from dataclasses import replace
from typing import Final

from esper.karn import notation
from esper.karn.drawing.chart import Chart, Panel, StackedPart, draw
from esper.karn.drawing.picture import Picture, series_table
from esper.karn.palette import OP_STAGES
from esper.karn.questions.episode_selection import is_training
from esper.karn.questions.series import Series, Values, query_series
from esper.karn.run import Run
from esper.leyline.stages import Stage

DECISIONS: Final = "decisions"
FORCED: Final = "forced"
"""Share of decisions with only one legal action; after the name of an op, restricted to that op."""
FAILED: Final = "failed"


def choices(run: Run) -> Series | None:
    """Return the number of decisions and the share of each op; None without decisions."""
    ops = run.row.ops
    op = f"action[{run.row.heads.index('op') + 1}]"
    conditions = {name: f"{op} = {index}" for index, name in enumerate(ops)}
    conditions |= {f"{name} {FORCED}": f"forced AND {op} = {index}" for index, name in enumerate(ops)}
    conditions |= {FORCED: "forced", FAILED: "NOT succeeded"}
    shares = {name: f"count(*) FILTER ({which}) / count(*)" for name, which in conditions.items()}
    # A decision precedes the epoch that it affects; one more may follow the last epoch.
    epoch = "epoch + 1" if run.row.horizon is None else f"least(epoch + 1, {run.row.horizon})"
    position = "iteration" if is_training(run) else epoch
    found = query_series(run, "decision", {DECISIONS: "count(*)", **shares}, position=position)
    if found is not None or not is_training(run):
        return found
    # Without decision rows, episode rows still count how often each op was chosen.
    total = "nullif(sum(list_sum(op_counts)), 0)"
    shares = dict.fromkeys(shares, "NULL")
    shares |= {name: f"sum(op_counts[{index + 1}]) / {total}" for index, name in enumerate(ops)}
    return query_series(run, "episode", {DECISIONS: total, **shares})


def ops_of(found: Series) -> list[str]:
    """Return the names of the ops among the series."""
    return [name for name in found.values if f"{name} {FORCED}" in found.values]


def draw_choices(found: Series, compared: Series | None = None) -> Picture:
    """Draw the share of each op as stacked columns."""
    ops = {name: op_name(name) for name in ops_of(found)}
    shown = {ops.get(name, name): found[name] for name in (DECISIONS, *ops, FORCED, FAILED)}
    table = series_table(replace(found, values=shown), notation.share, {DECISIONS: notation.count})
    legend = "Striped: nothing but waiting was legal. Above: what failed."
    if found.last(FORCED) is None:
        legend = "Decisions were not recorded one by one: forced and failed are unknown."
    return Picture(draw(_chart, found, compared), *table, f"Shares of all decisions. {legend}")


def op_name(op: str) -> str:
    """Return a readable name of an op, short enough for a label."""
    return op.lower().replace("_", " ").removesuffix(" target")


def _chart(found: Series) -> Chart:
    parts = []
    for op in ops_of(found):
        chosen, forced = _percents(found[op]), _percents(found[f"{op} {FORCED}"])
        parts.append(StackedPart(op_name(op), chosen, _percent, _look(op), _overall(found, op), forced))
    failed = StackedPart(FAILED, _percents(found[FAILED]), _percent, "error", _overall(found, FAILED))
    return Chart(
        title="Mix of ops",
        description=", ".join(f"{part.name} {_percent(part.total)}" for part in parts if part.total),
        found=found,
        panels=[
            Panel(16, parts=[failed], zero=True, optional=True, ticks=1),
            Panel(170, parts=parts, zero=True, most=100.0, ticks=2, unit="%"),
        ],
        room=168,
    )


def _percents(shares: Values) -> list[float | None]:
    return [None if share is None else 100 * share for share in shares]


def _overall(found: Series, name: str) -> float:
    """Return the share in per cent of all decisions."""
    counts = [count or 0.0 for count in found[DECISIONS]]
    chosen = sum(count * (share or 0.0) for count, share in zip(counts, found[name], strict=True))
    return 100 * chosen / (sum(counts) or 1.0)


def _percent(value: float | None) -> str:
    return notation.share(None if value is None else value / 100)


def _look(op: str) -> str:
    stage = OP_STAGES.get(op, Stage.UNKNOWN)
    return "idle" if stage is Stage.DORMANT else stage.name.lower()
