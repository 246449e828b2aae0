"""A run or a training as one screen of a terminal: answers to questions in, rich's tables and texts out.

In this order: alive and how far, does growth pay, is the policy healthy, what is wrong, what does the network
look like. Colour means stage or severity only. A number inside its band is dim, outside bright with the limit
beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from esper.karn import notation
from esper.karn.lines import finding, op_label
from esper.karn.palette import LOOKS, SEVERITIES
from esper.karn.questions.alerts import AlertEntry, alerts
from esper.karn.questions.choices import choices
from esper.karn.questions.episodes import EpisodeKey, default_episode, episode_name, is_training
from esper.karn.questions.growth import growth, latest
from esper.karn.questions.heads import heads
from esper.karn.questions.health import health
from esper.karn.questions.improvement import improvement
from esper.karn.questions.lanes import Lane, Lanes, lanes
from esper.karn.questions.progress import Progress, progress, progress_line
from esper.karn.run import Run
from esper.leyline.stages import Stage

MOST_ALERTS: Final = 4
LABEL: Final = 8
"""Columns of the name of a section."""
BESIDE_COURSES: Final = 50
"""Columns of what stands beside the course of a score."""
BESIDE_LANES: Final = 58

Score = tuple[str, str, str, str]
"""Name, value, what is to be said of it, course."""


def screen(run: Run, width: int, env: int | None = None) -> RenderableType:
    """All sections; of a training, slots of its best episode or of the last one of environment ``env``."""
    found = progress(run)
    in_training = is_training(run)
    chosen = (
        default_episode(run) if env is None or not in_training else EpisodeKey(env, max(found.done - 1, 0))
    )
    shown = None if chosen is None else lanes(run, chosen)
    columns = max(width - BESIDE_COURSES, 1)
    scores = _training_scores(run, columns) if in_training else _run_scores(run, shown, columns)
    sections: list[RenderableType] = [_head(found), _scores(scores)]
    if in_training:
        sections += _policy(run)
    sections.append(_alerts(run))
    if shown is not None:
        if in_training:
            sections.append(Text(f"{'slots':<{LABEL}}{episode_name(shown.episode, trained=True)}"))
        sections.append(_slots(shown, max(width - BESIDE_LANES, 1)))
    return Group(*sections)


def _head(found: Progress) -> Table:
    table = Table.grid(expand=True)
    table.add_row(Text(progress_line(found), style="bold"))
    if found.total is not None:
        table.add_row(ProgressBar(total=found.total, completed=found.done))
    return table


def _scores(rows: Iterable[Score]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, width=LABEL - 2)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for name, value, facts, course in rows:
        table.add_row(name, value, facts, Text(course, style="dim" if name == "twin" else ""))
    return table


def _params(run: Run, params: float | None) -> Score:
    host = run.row.host_params
    facts = f"{notation.factor(params, host)} the host's {notation.count(host)}"
    return "params", notation.count(params), facts, ""


def _run_scores(run: Run, shown: Lanes | None, columns: int) -> list[Score]:
    if shown is None or not shown.scores:
        return []
    last = shown.scores[-1]
    scores, twins = [point.score for point in shown.scores], [point.twin for point in shown.scores]
    span = notation.shared_scale([*scores, *twins])
    lead = notation.gain(notation.difference(last.score, last.twin))
    best = notation.points(max(scores))
    return [
        ("score", notation.points(last.score), f"best {best}", notation.trend(scores, columns, *span)),
        ("twin", notation.points(last.twin), f"lead {lead}", notation.trend(twins, columns, *span)),
        _params(run, last.params),
    ]


def _training_scores(run: Run, columns: int) -> list[Score]:
    now, grown, improved = latest(run), growth(run), improvement(run)
    if now is None or grown is None or improved is None:
        return []
    scores, twins = [point.score for point in grown.points], [point.twin for point in grown.points]
    span = notation.shared_scale([*scores, *twins])
    lead = notation.gain(notation.difference(now.score, now.twin))
    last = improved.points[-1]
    returns = [point.median for point in improved.points]
    quartiles = f"quartiles {notation.gain(last.quarter, 2)} to {notation.gain(last.three_quarters, 2)}"
    evaluated = [point.evaluation_score for point in improved.points if point.evaluation_score is not None]
    argmax = evaluated[-1] if evaluated else None
    best = f"best {notation.points(max(evaluated))}" if evaluated else "not evaluated yet"
    return [
        ("score", notation.points(now.score), f"lead {lead}", notation.trend(scores, columns, *span)),
        ("twin", notation.points(now.twin), "", notation.trend(twins, columns, *span)),
        ("return", notation.gain(last.median, 2), quartiles, notation.trend(returns, columns)),
        _params(run, now.params),
        ("argmax", notation.points(argmax), best, notation.trend(evaluated, columns)),
    ]


def _labelled(label: str, content: RenderableType) -> Table:
    table = Table.grid()
    table.add_column(width=LABEL)
    table.add_column()
    table.add_row(label, content)
    return table


def _policy(run: Run) -> list[RenderableType]:
    """Is PPO healthy, is a head dead, what is chosen: each by its last point."""
    healthy, entropies, chosen = health(run), heads(run), choices(run)
    if healthy is None or entropies is None or chosen is None:
        return []
    metrics = [metric for metric in healthy.metrics if metric.low is not None or metric.high is not None]
    point = chosen.points[-1]
    cells = {
        "policy": [_reading(m.name.replace("_", " "), m.values[-1], m.low, m.high) for m in metrics],
        "entropy": [
            _reading(name, course[-1], entropies.low)
            for name, course in zip(entropies.names, entropies.entropy, strict=True)
        ],
        "ops": [
            Text(f"{op_label(name)} {notation.share(point.share(op.chosen))}")
            for name, op in zip(chosen.ops, point.ops, strict=True)
        ],
    }
    return [_labelled(label, Columns(texts, padding=(0, 2))) for label, texts in cells.items()]


def _reading(name: str, value: float | None, low: float | None, high: float | None = None) -> Text:
    """A number with its name, and the limit it is beyond if it is."""
    limit = ""
    if value is not None and low is not None and value < low:
        limit = f" <{low:g}"
    elif value is not None and high is not None and value > high:
        limit = f" >{high:g}"
    return Text(f"{name} {notation.significant(value)}{limit}", style="bold" if limit else "dim")


def _alerts(run: Run) -> RenderableType:
    """Open alerts first, then the latest."""
    found = alerts(run)
    lines = [_alert(entry, found.axis) for entry in found.entries[:MOST_ALERTS]]
    more = len(found.entries) + found.left_out - len(lines)
    if more or not lines:
        lines.append(Text(f"and {more} more" if more else "none", style="dim"))
    return _labelled("alerts", Group(*lines))


def _alert(entry: AlertEntry, unit: str) -> Text:
    look = SEVERITIES[entry.severity]
    is_open = entry.until is None
    text = Text(no_wrap=True, overflow="ellipsis", style="" if is_open else "dim")
    text.append(f"{look.glyph} {entry.rule}", style=look.colour if is_open else "")
    ended = "" if is_open else f" until {entry.until}"
    times = f", {entry.times} times" if entry.times > 1 else ""
    text.append(f"  {entry.scope}  {finding(entry.value, entry.limit)}  {unit} {entry.since}{ended}{times}")
    return text.append(f"  {entry.hint}")


def _slots(shown: Lanes, columns: int) -> Table:
    """One line per slot: its stages over the epochs, and the seed in it."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("slot", no_wrap=True, min_width=LABEL - 1)
    for heading in (f"epoch {shown.epoch}/{shown.horizon}", "stage", "seed"):
        table.add_column(heading, no_wrap=True)
    for heading in ("alpha", "contribution", "params"):
        table.add_column(heading, no_wrap=True, justify="right")
    for lane in shown.lanes:
        cells = [notation.UNKNOWN] * 4
        if lane.seeds and (seed := lane.seeds[-1]).fate in ("alive", "fossilized"):
            contribution = notation.gain_with_error(seed.contribution, seed.contribution_error)
            cells = [
                seed.blueprint,
                notation.points(lane.alpha, 2),
                contribution,
                notation.count(seed.params),
            ]
        stage = Text(lane.stage.name.lower(), style=LOOKS[lane.stage].colour)
        table.add_row(lane.slot, _lane(lane, shown, columns), stage, *cells)
    return table


def _lane(lane: Lane, shown: Lanes, columns: int) -> Text:
    """A glyph per epoch; where several share a column, the last of them, or a prune among them."""
    stages = [Stage.DORMANT] * shown.epoch
    for span in lane.spans:
        stages[span.start : span.end] = [span.stage] * (span.end - span.start)
    for mark in lane.marks:
        if mark.stage is Stage.PRUNED and mark.epoch:
            stages[mark.epoch - 1] = Stage.PRUNED
    step = -(-shown.horizon // columns)
    shared = (stages[start : start + step] for start in range(0, len(stages), step))
    looks = [LOOKS[Stage.PRUNED if Stage.PRUNED in some else some[-1]] for some in shared]
    return Text.assemble(*((look.glyph, look.colour) for look in looks))
