"""What the list and the header of a run say: texts made from the answers to questions."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from esper.karn import notation
from esper.karn.outcome import final_rows, result
from esper.karn.questions.alerts import AlertEntry, Alerts, alerts
from esper.karn.questions.growth import Growth, growth, latest
from esper.karn.questions.progress import Progress, progress
from esper.karn.run import Run
from esper.leyline.events import Severity

TREND: Final = 16
"""Letters of a trend, at most."""
State = Literal["running", "finished", "stopped", "unreadable"]


@dataclass(frozen=True, slots=True)
class OpenAlert:
    """An alert that holds, in words."""

    severity: Severity
    rule: str
    scope: str
    since: str
    hint: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One run in the list and on top of its page; of one that cannot be read, why."""

    state: State
    error: str | None = None
    task: str = ""
    controller: str = ""
    share: float | None = None
    """Of the work that is done; None: unknown."""
    progress: str = ""
    time: str = ""
    left: str = ""
    pace: str = ""
    trend: str = ""
    """Of the score so far."""
    score: str = ""
    twin: str = ""
    lead: str = ""
    params: str = ""
    started: str = ""
    counts: dict[Severity, int] = field(default_factory=dict)
    """Open alerts."""
    alerts: list[OpenAlert] = field(default_factory=list)


def entry_of(run: Run) -> Entry:
    """What is known of a run now."""
    row, reached, wrong, shown = run.row, progress(run), alerts(run), _shown(run)
    open_ones = [entry for entry in wrong.entries if entry.until is None]
    return Entry(
        state=reached.state,
        task=row.task,
        controller=row.controller,
        share=reached.share,
        progress=_progress(reached),
        time=notation.clock(reached.seconds),
        left=notation.clock(reached.seconds_left),
        pace=f"{notation.significant(reached.steps_per_second)} steps/s",
        trend=_trend(growth(run)),
        score=notation.points(shown.score),
        twin=notation.points(shown.twin),
        lead=notation.gain(notation.difference(shown.score, shown.twin)),
        params=notation.factor(shown.params, row.host_params),
        started=row.started[:16].replace("T", " "),
        counts=dict(Counter(entry.severity for entry in open_ones)),
        alerts=[_open_alert(entry, wrong) for entry in open_ones],
    )


def _trend(found: Growth | None) -> str:
    """The scores on a scale from 0, as few as fit."""
    scores = [point.score for point in found.points] if found else []
    step = max(math.ceil(len(scores) / TREND), 1)
    shown = scores[::-1][::step][::-1]  # the last one is among them
    return notation.sparkline(shown, 0.0, max(filter(None, shown), default=0.0))


def _progress(reached: Progress) -> str:
    total = "" if reached.total is None else f"/{notation.count(reached.total)}"
    return f"{reached.unit} {notation.count(reached.done)}{total}"


class Shown(NamedTuple):
    """The numbers of a run in one line; None is unknown."""

    score: float | None = None
    twin: float | None = None
    params: float | None = None


def _shown(run: Run) -> Shown:
    """Of a run that goes on, its last epoch or iteration; of one that is over, what its episodes came to."""
    episodes = None if run.state == "running" else result(final_rows(run))
    if episodes is not None:
        twin = None if episodes.twin_score is None else episodes.twin_score.mean
        return Shown(episodes.val_score.mean, twin, episodes.params.mean)
    last = latest(run)
    return Shown() if last is None else Shown(last.score, last.twin, last.params)


def _open_alert(entry: AlertEntry, found: Alerts) -> OpenAlert:
    since = f"since {found.axis} {entry.since}" + (f", {entry.times} times" if entry.times > 1 else "")
    return OpenAlert(entry.severity, entry.rule, entry.scope, since, entry.hint)
