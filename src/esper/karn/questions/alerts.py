"""Chart of the alerts of a run: one row per alert rule, in which each alert is a line from its raising to its
clearing.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from markupsafe import Markup

from esper.karn import notation
from esper.karn.drawing import svg
from esper.karn.drawing.axes import AxisScale
from esper.karn.drawing.chart import Strip, Strips
from esper.karn.drawing.picture import Picture
from esper.karn.drawing.svg import number
from esper.karn.questions.series import Axis, AxisName, axis_of
from esper.karn.run import Run
from esper.leyline.rows import Severity

MOST_ENTRIES: Final = 100
"""Largest number of rows in the table of alerts; open alerts come first, then the latest alerts."""
_ORDER: Final = "t, episode, attempt, env, epoch, value"
"""Columns by which SQL sorts the alerts that one alert rule raised for one scope (such as a policy head or a
slot). Sorting by time alone is not enough, because several environments may raise alerts at the same time.
"""
_STRIPS: Final = Strips(left=190, right=100, height=26)


AlertSpan = tuple[int, int | None]
"""Interval of an alert in epochs or iterations, as (start, end); the end is None while the alert is open."""


class AlertLine(NamedTuple):
    """All alerts of one alert rule in a run."""

    rule: str
    severity: Severity
    times: int
    """Number of alerts of this alert rule, over all scopes (such as policy heads and slots)."""
    spans: tuple[AlertSpan, ...]

    @property
    def is_open(self) -> bool:
        return any(end is None for _, end in self.spans)


class AlertEntry(NamedTuple):
    """All alerts of one alert rule for one scope (such as a policy head or a slot)."""

    rule: str
    severity: Severity
    scope: str
    times: int
    since: int
    """Epoch or iteration of the first alert of this rule and scope (such as a policy head or a slot)."""
    until: int | None
    """Epoch or iteration in which the last alert of this rule and scope was cleared; None while an alert is
    open.
    """
    value: float | None
    limit: float | None
    hint: str
    """Hint (what to do) that came with the last alert of this alert rule and scope."""


class Alerts(NamedTuple):
    """All alerts of a run, by alert rule and by scope."""

    axis: AxisName
    end: int
    lines: tuple[AlertLine, ...]
    """Alert rules in order of their first alert."""
    entries: tuple[AlertEntry, ...]
    left_out: int
    """Number of alerts that the table of alerts omits, because it has at most ``MOST_ENTRIES`` rows."""

    @property
    def open(self) -> int:
        """Number of alert rules with an open alert."""
        return sum(line.is_open for line in self.lines)


def alerts(run: Run) -> Alerts:
    """Return all alerts of a run, with their times in iterations or epochs."""
    axis = axis_of(run)
    raised = _raised(axis)
    rules = run.fetch(
        f"""
        WITH {raised}
        SELECT rule, CASE WHEN bool_or(severity = 'error') THEN 'error' ELSE 'warning' END, count(*),
               list(DISTINCT [start, stop])
        FROM raised GROUP BY rule ORDER BY min(t), min(start), rule
        """
    )
    entries = run.fetch(
        f"""
        WITH {raised}
        SELECT rule, severity, scope, count(*), min(start),
               CASE WHEN bool_or(stop IS NULL) THEN NULL ELSE max(stop) END AS until,
               last(value ORDER BY {_ORDER}), last("limit" ORDER BY {_ORDER}), last(hint ORDER BY {_ORDER})
        FROM raised GROUP BY rule, severity, scope
        ORDER BY until IS NOT NULL, max(t) DESC, rule, scope, severity
        """
    )
    found = tuple(AlertEntry(*values) for values in entries)
    lines = tuple(AlertLine._make([*line, _merged(spans, axis.bin_size)]) for *line, spans in rules)
    ends = [end or start for line in lines for start, end in line.spans]
    return Alerts(axis.name, max([axis.end, *ends]), lines, found[:MOST_ENTRIES], len(found[MOST_ENTRIES:]))


def _raised(axis: Axis) -> str:
    """Return SQL that selects all raised alerts, each with its first and last epoch or iteration.

    An alert ends when it is cleared or raised again; an alert of an episode ends with the episode.
    """
    table, is_bound = ("update", "env IS NOT NULL") if axis.name == "iteration" else ("epoch", "false")
    seen = f"(SELECT max({table}.{axis.name}) FROM {table} WHERE {table}.t <= alert.t)"
    place = f"coalesce(alert.{axis.name}, {seen}, 0)"
    return f"""
        placed AS (SELECT alert.*, {place} AS start FROM alert),
        followed AS (SELECT *, lead(event) OVER same AS next_event, lead(start) OVER same AS next_start
                     FROM placed WINDOW same AS (PARTITION BY rule, scope, env, episode, attempt
                                               ORDER BY t, event DESC)),
        raised AS (SELECT *, CASE WHEN next_event = 'cleared' THEN next_start
                                  WHEN next_event IS NOT NULL OR {is_bound} THEN start END AS stop
                   FROM followed WHERE event = 'raised')"""


def _merged(spans: Iterable[AlertSpan], bin_size: int) -> tuple[AlertSpan, ...]:
    """Merge intervals of alerts that overlap or are less than one axis bin apart."""
    merged: list[AlertSpan] = []
    for start, end in sorted(spans, key=lambda span: span[0]):
        first, last = merged[-1] if merged else (start, start - bin_size)
        if last is None or start < last + bin_size:
            merged[-1] = first, None if last is None or end is None else max(last, end)
        else:
            merged.append((start, end))
    return tuple(merged)


def draw_alerts(found: Alerts, compared: Alerts | None = None) -> Picture:
    """Draw one strip (row of the chart) per alert rule; the horizontal axis also covers a second run if
    given.
    """
    end = max(one.end for one in (found, compared) if one is not None)
    names = ", ".join(line.rule for line in found.lines)
    caption = "No alert was raised."
    if found.lines:
        more = f" {notation.count(found.left_out)} older entries are left out." if found.left_out else ""
        caption = f"{found.open} of {len(found.lines)} rules that were raised are still open.{more}"
    strips, raised = list(map(_strip, found.lines)), f"Raised: {names or 'nothing'}."
    return Picture(
        _STRIPS.draw("Alerts", raised, found.axis, end, strips),
        ["rule", "severity", "about", "times", "since", "until", "value", "limit", "hint"],
        [_cells(entry, found.axis) for entry in found.entries],
        caption,
    )


def _cells(entry: AlertEntry, axis: AxisName) -> list[str]:
    until = "open" if entry.until is None else f"{axis} {entry.until}"
    numbers = map(notation.significant, (entry.value, entry.limit))
    about = [entry.rule, entry.severity, entry.scope, notation.count(entry.times)]
    return [*about, f"{axis} {entry.since}", until, *numbers, entry.hint]


def _strip(line: AlertLine) -> Strip:
    times = f"{notation.count(line.times)}×"

    def draw(x: AxisScale, top: float) -> Iterator[Markup]:
        middle = top + _STRIPS.height / 2
        yield svg.line(x.start, middle, x.stop, middle, "grid")
        ends = [(x(start), x.stop if end is None else x(end)) for start, end in line.spans]
        spans = "".join(f"M{number(start)} {number(middle)}H{number(end)}" for start, end in ends)
        yield svg.path(spans, f"alert {line.severity}-line")

    value = f"{times} open" if line.is_open else times
    return Strip(line.rule.replace("_", " "), draw, value, line.is_open)
