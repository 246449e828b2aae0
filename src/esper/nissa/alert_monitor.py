"""Evaluation of the alert rules: an alert is raised when its condition starts and cleared when it ends.

Alerts depend only on telemetry rows. No alert rule uses rows of two tables, so the rows of finished
iterations can be replayed table by table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from esper.leyline.rows import AlertRow, EnvRow, EpisodeRow, Row, RunRow, SeedRow, TransitionRow, UpdateRow
from esper.leyline.stages import OCCUPIED_STAGES
from esper.nissa.alert_rules import GOVERNOR_RULES, RULES, Rule
from esper.nissa.conditions import Reading, RowHistory

PASSED: Final = "It has passed."
"""Hint text of a cleared alert."""
_RULES_OF: Final[Mapping[type[Row], tuple[Rule, ...]]] = {
    table: tuple(rule for rule in RULES if rule.table is table) for table in {rule.table for rule in RULES}
}


@dataclass(slots=True)
class _AlertState:
    """State of one alert rule for one scope."""

    wrong_in_a_row: int = 0
    raised: AlertRow | None = None
    """Open alert of the rule and scope; None if no alert is open."""
    env: int | None = None
    slot: int | None = None
    """Slot that an alert about a seed belongs to; such an alert ends with the seed or the episode."""


class AlertMonitor:
    """Alert rules of one run with their state."""

    def __init__(self, run: RunRow) -> None:
        self._past = RowHistory(run)
        self._states: dict[tuple[str, str], _AlertState] = {}
        """State of the alert rules, by rule and scope."""

    def take(self, row: Row) -> list[AlertRow]:
        """Return the alerts that a row raises or clears; alerts of the governor are recorded but not returned
        again.
        """
        alerts: list[AlertRow | None] = []
        for rule in _RULES_OF.get(type(row), ()):
            alerts += [self._evaluate(rule, reading, row) for reading in rule.evaluate(row, self._past)]
        match row:
            case AlertRow(event="raised") if row.rule in GOVERNOR_RULES:
                self._states[row.rule, row.scope] = _AlertState(raised=row, env=row.env)
            case EpisodeRow():
                alerts += self._end_of(row, slot=None)
            case TransitionRow() if row.to_stage not in OCCUPIED_STAGES:
                alerts += self._end_of(row, slot=row.slot)
        self._past.remember(row)
        return [alert for alert in alerts if alert is not None]

    def _evaluate(self, rule: Rule, reading: Reading, row: Row) -> AlertRow | None:
        course = self._states.setdefault((rule.name, reading.scope), _AlertState())
        if isinstance(row, SeedRow):
            course.env, course.slot = row.env, row.slot
        course.wrong_in_a_row = course.wrong_in_a_row + 1 if reading.wrong else 0
        if course.raised is None and course.wrong_in_a_row >= rule.times:
            course.raised = AlertRow(
                rule=rule.name,
                event="raised",
                severity=rule.severity,
                scope=reading.scope,
                value=reading.value,
                limit=reading.limit,
                hint=rule.hint,
                **_when(row),
            )
            return course.raised
        if course.raised is not None and not reading.wrong:
            raised, course.raised = course.raised, None
            return _cleared(raised, value=reading.value, limit=reading.limit, **_when(row))
        return None

    def _end_of(self, row: EpisodeRow | TransitionRow, slot: int | None) -> list[AlertRow]:
        """Clear the alerts of the episode that ended, or of the seed that left its slot."""
        courses = list(self._states.items())
        ended = [key for key, one in courses if one.env == row.env and slot in (None, one.slot)]
        raised = [self._states.pop(key).raised for key in ended]
        return [_cleared(alert, value=None, **_place(row)) for alert in raised if alert is not None]


def _cleared(raised: AlertRow, **changed: Any) -> AlertRow:
    return msgspec.structs.replace(raised, event="cleared", hint=PASSED, t=0.0, **changed)


def _when(row: Row) -> dict[str, Any]:
    """Return the columns of an alert for its time, and for its episode if the row belongs to one."""
    match row:
        case SeedRow():
            return _place(row)
        case UpdateRow() | EpisodeRow():
            return {"iteration": row.iteration}
    return {}


def _place(row: EnvRow) -> dict[str, Any]:
    """Return the columns that locate a row within the run."""
    return {name: getattr(row, name) for name in ("env", "episode", "attempt", "iteration", "epoch")}
