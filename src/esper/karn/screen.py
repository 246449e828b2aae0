"""Terminal screen of a run or a training, built from rich tables.

Sections of the screen in order: progress, scores of host and twin, PPO diagnostics, open alerts, slots of one
episode. Colours on the screen stand only for stages of seeds and severities of alerts. A PPO metric inside
its recommended band is shown dim; a metric outside its band is shown bold with the violated limit.
"""

from typing import Final

from rich.columns import Columns
from rich.console import Group, JustifyMethod, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from esper.karn import notation
from esper.karn.log_lines import finding
from esper.karn.palette import LOOKS, SEVERITIES, op_look
from esper.karn.questions.alerts import AlertEntry
from esper.karn.questions.breakdowns import choices, ops_of
from esper.karn.questions.episode_selection import EpisodeKey, default_episode
from esper.karn.questions.learning_curves import improvement
from esper.karn.questions.policy_health import LOW_ENTROPY, beyond, heads, health
from esper.karn.questions.slot_lanes import Lane, Lanes, lanes
from esper.karn.run import Run
from esper.karn.runs import Overview, RunProgress, done_text, overview
from esper.leyline import RunRow, Stage

MOST_ALERTS: Final = 4
LABEL: Final = 8
"""Width of the labels of the screen's sections, in terminal columns."""
TREND_MARGIN: Final = 50
"""Number of terminal columns that a score needs besides its trend (a series drawn as block characters)."""
LANE_MARGIN: Final = 58


def screen(run: Run, width: int, env: int | None = None) -> RenderableType:
    """Build the terminal screen of a run.

    Args:
        run: Run that the screen shows.
        width: Width of the terminal in columns.
        env: Environment whose last episode is shown; None shows the best episode of a policy training, or the
            last episode of any other run.
    """
    found = overview(run)
    columns = max(width - TREND_MARGIN, 1)
    scores = _scores(found, columns)
    sections: list[RenderableType] = [_head(found.row, found.progress), scores]
    chosen = default_episode(run)
    if run.is_training:
        _add_returns(scores, run, columns)
        sections += _policy(run)
        chosen = chosen if env is None else EpisodeKey(env, max(found.progress.done - 1, 0))
    sections.append(_alerts(found))
    shown = None if chosen is None else lanes(run, chosen)
    if shown is not None:
        sections += [_title(shown), _slots(shown, max(width - LANE_MARGIN, 1))]
    return Group(*sections)


def _head(row: RunRow, found: RunProgress) -> Table:
    parts = [row.task, row.controller, found.state, done_text(found), notation.clock(found.seconds)]
    parts += [f"left {notation.clock(found.seconds_left)}"] if found.state == "running" else []
    table = Table.grid(expand=True)
    pace = f"{notation.significant(found.steps_per_second)} steps/s"
    table.add_row(Text(" · ".join([*parts, pace]), style="bold"))
    if found.total is not None:
        table.add_row(ProgressBar(total=found.total, completed=found.done))
    return table


def _scores(found: Overview, columns: int) -> Table:
    """Return a table with one row each for score, twin's score and parameters: name, value, comparison,
    trend.
    """
    name, value = Column(width=LABEL - 2, no_wrap=True), Column(justify="right", no_wrap=True)
    table = Table.grid(name, value, Column(no_wrap=True), Column(no_wrap=True), padding=(0, 2, 0, 0))
    span = notation.shared_scale([*found.scores, *found.twins])
    metric = found.metric
    best = metric.best(found.scores)
    scores, twins = (notation.trend(course, columns, *span) for course in (found.scores, found.twins))
    table.add_row(metric.name, metric.text(found.score), f"best {metric.text(best)}", scores)
    lead = f"lead {metric.gain(found.lead)}"
    table.add_row("twin", metric.text(found.twin), lead, Text(twins, "dim"))
    host = found.row.host_params
    growth = f"{notation.factor(found.params, host)} the host's {notation.count(host)}"
    table.add_row("params", notation.count(found.params), growth)
    return table


def _add_returns(table: Table, run: Run, columns: int) -> None:
    """Add the returns of the rollouts and the scores of the argmax evaluations to the table of scores."""
    improved = improvement(run)
    if improved is None:
        return
    low, middle, high = (notation.gain(improved.last(name), 2) for name in ("25 %", "median", "75 %"))
    table.add_row("return", middle, f"quartiles {low} to {high}", notation.trend(improved["median"], columns))
    evaluated = [score for score in improved["evaluation score"] if score is not None]
    if evaluated:
        best, course = notation.points(max(evaluated)), notation.trend(evaluated, columns)
        table.add_row("argmax", notation.points(evaluated[-1]), f"best {best}", course)


def _labelled(label: str, content: RenderableType) -> Table:
    table = Table.grid(Column(width=LABEL), Column())
    table.add_row(label, content)
    return table


def _policy(run: Run) -> list[RenderableType]:
    """Return the last PPO metrics, entropies of policy heads and op shares as labelled lines."""
    healthy, entropies, chosen = health(run), heads(run), choices(run)
    if healthy is None or entropies is None or chosen is None:
        return []
    metrics = [metric for metric in healthy.metrics if metric.low is not None or metric.high is not None]
    last = healthy.series.last
    cells = {
        "policy": [_reading(m.name.replace("_", " "), last(m.name), m.low, m.high) for m in metrics],
        "entropy": [_reading(name, entropies.last(name), LOW_ENTROPY) for name in entropies.values],
        "ops": [Text(f"{op_look(op).label} {notation.share(chosen.last(op))}") for op in ops_of(chosen)],
    }
    return [_labelled(label, Columns(texts, padding=(0, 2))) for label, texts in cells.items()]


def _reading(name: str, value: float | None, low: float | None, high: float | None = None) -> Text:
    """Format a PPO metric with its name, and with the violated limit if the value is outside the metric's
    band.
    """
    limit = beyond(value, low, high).replace(" ", "")
    return Text(f"{name} {notation.significant(value)} {limit}".rstrip(), style="bold" if limit else "dim")


def _alerts(found: Overview) -> RenderableType:
    """Return the open alerts of a run as a list, at most ``MOST_ALERTS`` of them."""
    lines = [_alert(entry, found.progress.unit) for entry in found.alerts[:MOST_ALERTS]]
    more = len(found.alerts) - len(lines)
    if more or not lines:
        lines.append(Text(f"and {more} more" if more else "none open", style="dim"))
    return _labelled("alerts", Group(*lines))


def _alert(entry: AlertEntry, unit: str) -> Text:
    look = SEVERITIES[entry.severity]
    times = f", {entry.times} times" if entry.times > 1 else ""
    facts = f"{entry.scope}  {finding(entry.value, entry.limit)}  {unit} {entry.since}{times}  {entry.hint}"
    rule = (f"{look.glyph} {entry.rule}  ", look.colour)
    return Text.assemble(rule, facts, no_wrap=True, overflow="ellipsis")


def _title(shown: Lanes) -> Text:
    """Return a title for the table of slots: the episode, its last score, and the last score of its twin."""
    score, twin = map(shown.metric.text, shown.last_scores)
    text = f"{'slots':<{LABEL}}{shown.name}: {shown.metric.name} {score}, twin {twin}"
    return Text(text, no_wrap=True, overflow="ellipsis")


def _slots(shown: Lanes, columns: int) -> Table:
    """Return a table with one row per slot: the stages over the epochs, and the current seed."""
    words = ("slot", f"epoch {shown.epoch}/{shown.horizon}", "stage", "seed")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for heading in (*words, "alpha", "contribution", "params"):
        side: JustifyMethod = "left" if heading in words else "right"
        width = LABEL - 1 if heading == "slot" else None
        table.add_column(heading, no_wrap=True, min_width=width, justify=side)
    for lane in shown.lanes:
        cells = [notation.UNKNOWN] * 4
        if lane.seeds and (seed := lane.seeds[-1]).fate in ("alive", "fossilized"):
            worth = shown.metric.gain_with_error(seed.contribution, seed.contribution_error)
            cells = [seed.blueprint, notation.points(lane.alpha, 2), worth, notation.count(seed.params)]
        stage = Text(lane.stage.name.lower(), style=LOOKS[lane.stage].colour)
        table.add_row(lane.slot, _lane(lane, shown, columns), stage, *cells)
    return table


def _lane(lane: Lane, shown: Lanes, columns: int) -> Text:
    """Draw the stages of a slot, one glyph per epoch. A glyph for several epochs shows a prune if there was
    one, else the last stage.
    """
    stages = [Stage.DORMANT] * shown.epoch
    for span in lane.spans:
        stages[span.start : span.end] = [span.stage] * (span.end - span.start)
    for mark in lane.marks:
        if mark.to_stage == Stage.PRUNED and mark.epoch:
            stages[mark.epoch - 1] = Stage.PRUNED
    step = -(-shown.horizon // columns)
    shared = (stages[start : start + step] for start in range(0, len(stages), step))
    looks = [LOOKS[Stage.PRUNED if Stage.PRUNED in some else some[-1]] for some in shared]
    return Text.assemble(*((look.glyph, look.colour) for look in looks))
