"""What every screen begins and ends with: the header line, and what is wrong."""

from __future__ import annotations

from typing import Final

from rich.text import Text

from esper.karn import notation
from esper.karn.following import AlertState, Following
from esper.karn.lines import alert_finding, alert_place
from esper.karn.palette import SEVERITIES
from esper.karn.sections.bands import INSIDE
from esper.karn.sections.layout import Section, labelled
from esper.leyline.events import RunRow

ALERTS: Final = 3
"""Lines that alerts have at least, if there are so many."""
MANY_ALERTS: Final = 12
_MIN_NAME: Final = 10
_MIN_BAR: Final = 4
_MAX_BAR: Final = 40


def header(state: Following, width: int) -> Text:
    """Which run, how far, how long, how much longer, how fast; what does not fit goes."""
    run = state.run
    if run is None:
        return Text(" esper", style="bold").append("  waiting for the run to begin", style="not bold dim")
    counted = _counted(state, run)
    times = f"  {notation.clock(state.elapsed)}  left {notation.clock(state.left)}"
    speed = f"  {notation.tabular(state.steps_per_second)} steps/s"
    if width < len(" esper" + counted + times + speed) + _MIN_NAME:
        speed = ""
    name = _name(run, width - len(" esper" + counted + times + speed))
    room = width - len(" esper" + name + counted + times + speed)
    return Text.assemble((" esper", "bold"), name, counted, _bar(state, run, room), times, speed)


def _name(run: RunRow, room: int) -> str:
    """The run's own name, with its task unless the name says it or room is short."""
    full = f"  {run.task} · {run.name}"
    name = full if run.task not in run.name and len(full) <= room else f"  {run.name}"
    if room < _MIN_NAME:
        return ""
    return name if len(name) <= room else name[: room - 1] + "…"


def _progress(state: Following, run: RunRow) -> tuple[int, int]:
    if run.iterations is not None:
        return (state.iterations[-1].row.iteration if state.iterations else 0), run.iterations
    return (state.episode.epoch if state.episode else 0), run.horizon


def _counted(state: Following, run: RunRow) -> str:
    done, total = _progress(state, run)
    counter = f"{done:>{len(str(total))}}/{total}"
    if run.iterations is not None:
        return f"  iteration {counter}"
    episode = f"  episode {state.episode.episode}" if state.episode and state.episode.episode else ""
    return f"{episode}  epoch {counter}"


def _bar(state: Following, run: RunRow, room: int) -> Text:
    columns = min(room - 2, _MAX_BAR)
    if columns < _MIN_BAR:
        return Text()
    done, total = _progress(state, run)
    filled = columns * min(done, total) // max(total, 1)
    return Text("  " + "━" * filled).append("─" * (columns - filled), style="dim")


def alerts(state: Following, width: int) -> Section:
    """What is wrong and since when, the latest first; what is over is dim and comes last."""
    run = state.run
    latest = _latest_first(state)
    if run is None or not latest:
        return Section.of([labelled("alerts", Text("none", style=INSIDE))], least=1)

    def draw(room: int) -> list[Text]:
        shown = [_alert(alert, run, is_open=state.is_open(alert)) for alert in latest[:room]]
        lines = [labelled("" if index else "alerts", line) for index, line in enumerate(shown)]
        if len(latest) > room:
            more = f"  +{len(latest) - room} more"
            lines[-1].truncate(width - len(more), overflow="ellipsis", pad=True)
            lines[-1].append(more, style=INSIDE)
        return lines

    least = min(len(latest), ALERTS)
    return Section(draw, least, least, min(len(latest), MANY_ALERTS))


def _latest_first(state: Following) -> list[AlertState]:
    """Open ones, then those that are over."""
    latest = list(reversed(state.alerts.values()))
    return [a for a in latest if state.is_open(a)] + [a for a in latest if not state.is_open(a)]


def _alert(alert: AlertState, run: RunRow, *, is_open: bool) -> Text:
    row, look = alert.raised, SEVERITIES[alert.raised.severity]
    text = f"  {row.scope}  {alert_finding(row)}  {alert_place(row, run)}".rstrip()
    if alert.times > 1:
        text += f", {alert.times} times"
    named = f"{look.glyph} {row.rule}"
    if is_open:
        return Text.assemble((named, f"bold {look.colour}"), text, (f"  {row.hint}", INSIDE))
    if alert.cleared is not None:
        end = alert_place(alert.cleared, run)
        text += ", cleared" + (f" in {end}" if end else "")
    return Text(named + text, style=INSIDE)
