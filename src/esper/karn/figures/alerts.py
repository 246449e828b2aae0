"""What is wrong, and since when: a line per rule from where it was raised to where it was cleared."""

from __future__ import annotations

from typing import Final

from esper.karn import notation
from esper.karn.figures import svg
from esper.karn.figures.axes import Scale, alike, shared_end, x_axis
from esper.karn.figures.picture import Picture
from esper.karn.figures.svg import Markup, number
from esper.karn.questions.alerts import AlertEntry, AlertLine, Alerts, alerts
from esper.karn.questions.episodes import EpisodeKey
from esper.karn.run import Run

_LEFT: Final = 190.0
_RIGHT: Final = svg.WIDTH - 86
_ROW: Final = 26.0


def alerts_picture(run: Run, episode: EpisodeKey | None = None) -> Picture:
    """The answer of one episode or of the whole run; that nothing is wrong is an answer too."""
    return draw_alerts(alerts(run, episode))


def alerts_beside(run: Run, other: Run) -> Picture:
    """The whole run on an axis that holds another one too."""
    found = alerts(run)
    return draw_alerts(found, alike(found, alerts(other)))


def draw_alerts(found: Alerts, beside: Alerts | None = None) -> Picture:
    """One row per rule that was ever raised, on an axis that holds what is beside it too."""
    x = Scale(0, shared_end(found, beside), _LEFT, _RIGHT)
    bottom = 4 + _ROW * len(found.lines)
    content = [
        x_axis(x, bottom, found.axis, top=0),
        *(_draw_line(line, x, 4 + _ROW * index) for index, line in enumerate(found.lines)),
    ]
    nothing = [svg.text(0, 16, "no alert was raised", "dim")]
    names = ", ".join(line.rule for line in found.lines)
    return Picture(
        svg=svg.drawing(
            bottom + 28 if found.lines else 24,
            "Alerts",
            f"Raised: {names}" if names else "No alert was raised.",
            *(content if found.lines else nothing),
        ),
        columns=["rule", "severity", "about", "times", "since", "until", "value", "limit", "hint"],
        rows=[_cells(entry, found) for entry in found.entries],
        caption=_caption(found),
    )


def _caption(found: Alerts) -> str:
    if not found.lines:
        return "No alert was raised."
    more = f" {notation.count(found.left_out)} older entries are left out." if found.left_out else ""
    return f"{found.open} of {len(found.lines)} rules that were raised are still open.{more}"


def _cells(entry: AlertEntry, found: Alerts) -> list[str]:
    return [
        entry.rule,
        entry.severity,
        entry.scope,
        notation.count(entry.times),
        f"{found.axis} {entry.since}",
        "open" if entry.until is None else f"{found.axis} {entry.until}",
        notation.significant(entry.value),
        notation.significant(entry.limit),
        entry.hint,
    ]


def _draw_line(line: AlertLine, x: Scale, top: float) -> Markup:
    middle = top + _ROW / 2
    spans = "".join(
        f"M{number(x(span.start))} {number(middle)}H{number(x(span.end) if span.end is not None else x.stop)}"
        for span in line.spans
    )
    is_open = any(span.end is None for span in line.spans)
    times = f"{notation.count(line.times)}×"
    return svg.group(
        [
            svg.text(_LEFT - 10, middle + 5, svg.shorten(line.rule.replace("_", " "), 18), "", "end"),
            svg.line(_LEFT, middle, _RIGHT, middle, "grid"),
            svg.path(spans, f"alert {line.severity}-line"),
            svg.text(
                _RIGHT + 10, middle + 5, f"{times} open" if is_open else times, "strong" if is_open else "dim"
            ),
        ]
    )
