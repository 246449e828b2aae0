"""A run or a training as one screen of a terminal: answers to questions in, rich's tables and texts out.

In this order: alive and how far, does growth pay, is the policy healthy, what is wrong, what does the network
look like. Colour means stage or severity only. A number inside its band is dim, outside bright with the limit
beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from esper.karn import notation
from esper.karn.figures.progress import progress_line
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
from esper.karn.questions.progress import Progress, progress
from esper.karn.run import Run
from esper.leyline.stages import Stage

MOST_ALERTS: Final = 4
BESIDE_LANES: Final = 58
"""Columns of what stands beside a lane."""
BESIDE_COURSES: Final = 50
"""The same of the course of a score."""
LABEL: Final = 8

Score = tuple[str, str, str, str]
"""Name, value, what is to be said of it, course."""


def screen(run: Run, width: int, env: int | None = None) -> RenderableType:
    """All sections; of a training, the slots of its best episode or of the last one of environment ``env``."""
    found = progress(run)
    shown = lanes(run, _episode(run, found, env))
    columns = max(width - BESIDE_COURSES, 1)
    sections: list[RenderableType] = [_head(found)]
    if is_training(run):
        sections += [_scores(_training_scores(run, columns)), *_policy(run)]
    elif shown is not None:
        sections.append(_scores(_run_scores(run, shown, columns)))
    sections.append(_alerts(run, found.unit))
    if shown is not None:
        if is_training(run):
            sections.append(Text(f"slots   {episode_name(shown.episode, trained=True)}", no_wrap=True))
        sections.append(_slots(shown, max(width - BESIDE_LANES, 1)))
    return Group(*sections)


def _episode(run: Run, found: Progress, env: int | None) -> EpisodeKey | None:
    if env is None or not is_training(run):
        return default_episode(run)
    return EpisodeKey(env, max(found.done - 1, 0))


def _head(found: Progress) -> Table:
    table = Table.grid(expand=True)
    table.add_row(Text(progress_line(found), style="bold"))
    if found.total is not None:
        table.add_row(ProgressBar(total=found.total, completed=found.done))
    return table


def _scores(rows: Sequence[Score]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "right", "left", "left"):
        table.add_column(justify=justify, no_wrap=True)
    table.columns[0].width = LABEL - 2
    for name, value, facts, course in rows:
        table.add_row(name, value, facts, Text(course, style="dim" if name == "twin" else ""))
    return table


def _run_scores(run: Run, shown: Lanes, columns: int) -> list[Score]:
    scores, twins = ([getattr(point, name) for point in shown.scores] for name in ("score", "twin"))
    if not scores:
        return []
    last = shown.scores[-1]
    span = notation.shared_scale([*scores, *twins])
    lead = notation.gain(notation.difference(last.score, last.twin))
    return [
        (
            "score",
            notation.points(last.score),
            f"best {notation.points(max(scores))}",
            notation.trend(scores, columns, *span),
        ),
        ("twin", notation.points(last.twin), f"lead {lead}", notation.trend(twins, columns, *span)),
        _params(run, last.params),
    ]


def _params(run: Run, params: float | None) -> Score:
    host = run.row.host_params
    return (
        "params",
        notation.count(params),
        f"{notation.factor(params, host)} the host's {notation.count(host)}",
        "",
    )


def _training_scores(run: Run, columns: int) -> list[Score]:
    now, grown, improved = latest(run), growth(run), improvement(run)
    if now is None or grown is None or improved is None:
        return []
    scores, twins = ([getattr(point, name) for point in grown.points] for name in ("score", "twin"))
    span = notation.shared_scale([*scores, *twins])
    last = improved.points[-1]
    returns = [point.median for point in improved.points]
    evaluated = [point.evaluation_score for point in improved.points if point.evaluation_score is not None]
    quartiles = f"quartiles {notation.gain(last.quarter, 2)} to {notation.gain(last.three_quarters, 2)}"
    lead = notation.gain(notation.difference(now.score, now.twin))
    return [
        ("score", notation.points(now.score), f"lead {lead}", notation.trend(scores, columns, *span)),
        ("twin", notation.points(now.twin), "", notation.trend(twins, columns, *span)),
        ("return", notation.gain(last.median, 2), quartiles, notation.trend(returns, columns)),
        _params(run, now.params),
        ("argmax", notation.points(evaluated[-1]), f"best {notation.points(max(evaluated))}",
         notation.trend(evaluated, columns))
        if evaluated else ("argmax", notation.UNKNOWN, "not evaluated yet", ""),
    ]  # fmt: skip


def _labelled(label: str, content: RenderableType) -> Table:
    table = Table.grid()
    table.add_column(width=LABEL)
    table.add_column()
    table.add_row(label, content)
    return table


def _read(name: str, value: str, low: str | None, high: str | None) -> Text:
    """A number with its name, and the limit it is beyond if it is."""
    limit = f" <{low}" if low is not None else f" >{high}" if high is not None else ""
    return Text(f"{name} {value}{limit}", style="bold" if limit else "dim")


def _policy(run: Run) -> list[RenderableType]:
    """Is PPO healthy, is a head dead, what is chosen."""
    healthy, entropies, chosen = health(run), heads(run), choices(run)
    sections: list[RenderableType] = []
    if healthy is not None:
        cells = []
        for metric in healthy.metrics:
            if metric.low is None and metric.high is None:
                continue
            value = metric.values[-1]
            is_out = metric.is_outside(value)
            is_low = is_out and metric.low is not None and value is not None and value < metric.low
            low, high = (
                (f"{metric.low:g}" if is_low else None),
                (f"{metric.high:g}" if is_out and not is_low else None),
            )
            cells.append(_read(metric.name.replace("_", " "), notation.significant(value), low, high))
        sections.append(_labelled("policy", Columns(cells, padding=(0, 2))))
    if entropies is not None:
        cells = []
        for name, course in zip(entropies.names, entropies.entropy, strict=True):
            value = course[-1]
            is_low = value is not None and entropies.low is not None and value < entropies.low
            cells.append(
                _read(name, notation.points(value, 2), f"{entropies.low:g}" if is_low else None, None)
            )
        sections.append(_labelled("entropy", Columns(cells, padding=(0, 2))))
    if chosen is not None:
        point = chosen.points[-1]
        cells = [
            Text(f"{op_label(name)} {notation.share(point.share(op.chosen))}")
            for name, op in zip(chosen.ops, point.ops, strict=True)
        ]
        sections.append(_labelled("ops", Columns(cells, padding=(0, 2))))
    return sections


def _alerts(run: Run, unit: str) -> RenderableType:
    """What is wrong: open alerts first, then the latest."""
    found = alerts(run)
    if not found.entries:
        return _labelled("alerts", Text("none", style="dim"))
    lines = [_alert(entry, unit) for entry in found.entries[:MOST_ALERTS]]
    more = len(found.entries) + found.left_out - len(lines)
    return _labelled("alerts", Group(*lines, *([Text(f"and {more} more", style="dim")] if more else [])))


def _alert(entry: AlertEntry, unit: str) -> Text:
    look = SEVERITIES[entry.severity]
    times = f", {entry.times} times" if entry.times > 1 else ""
    ended = "" if entry.until is None else f" until {entry.until}"
    text = Text(no_wrap=True, overflow="ellipsis", style="" if entry.until is None else "dim")
    text.append(f"{look.glyph} {entry.rule}", style=look.colour if entry.until is None else "")
    text.append(f"  {entry.scope}  {finding(entry.value, entry.limit)}  {unit} {entry.since}{ended}{times}")
    return text.append(f"  {entry.hint}")


def _slots(shown: Lanes, columns: int) -> Table:
    """What the network looks like: one line per slot, its stages over the epochs and the seed in it."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("slot", no_wrap=True, min_width=LABEL - 1)
    table.add_column(f"epoch {shown.epoch}/{shown.horizon}", no_wrap=True)
    for heading in ("stage", "seed"):
        table.add_column(heading, no_wrap=True)
    for heading in ("alpha", "contribution", "params"):
        table.add_column(heading, justify="right", no_wrap=True)
    for lane in shown.lanes:
        look = LOOKS[lane.stage]
        seed = lane.seeds[-1] if lane.seeds and lane.seeds[-1].fate in ("alive", "fossilized") else None
        table.add_row(
            lane.slot,
            _lane(lane, shown, columns),
            Text(lane.stage.name.lower(), style=look.colour),
            seed.blueprint if seed else notation.UNKNOWN,
            notation.points(lane.alpha if seed else None, 2),
            notation.gain_with_error(seed.contribution, seed.contribution_error)
            if seed
            else notation.UNKNOWN,
            notation.count(seed.params if seed else None),
        )
    return table


def _lane(lane: Lane, shown: Lanes, columns: int) -> Text:
    """A glyph per epoch; where several share a column, the last of them, or a prune among them."""
    stages = [Stage.DORMANT] * shown.epoch
    for span in lane.spans:
        stages[span.start : span.end] = [span.stage] * (span.end - span.start)
    for mark in lane.marks:
        if mark.stage is Stage.PRUNED and mark.epoch:
            stages[mark.epoch - 1] = Stage.PRUNED
    step = max(-(-shown.horizon // columns), 1)
    text = Text()
    for start in range(0, len(stages), step):
        together = stages[start : start + step]
        look = LOOKS[Stage.PRUNED if Stage.PRUNED in together else together[-1]]
        text.append(look.glyph, style=look.colour)
    return text
