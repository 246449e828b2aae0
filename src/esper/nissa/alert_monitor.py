"""Evaluates the alert rules on a run's rows: raised once when a condition begins, cleared once when it ends.

What it says is a function of the rows that it was given. No rule sees rows of two tables, so those of
finished iterations may be given again table by table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from esper.leyline.events import AlertRow, EnvRow, EpisodeRow, Row, RunRow, SeedRow, TransitionRow, UpdateRow
from esper.leyline.stages import OCCUPIED_STAGES
from esper.nissa.alert_rules import GOVERNOR_RULES, RULES, Rule
from esper.nissa.conditions import Reading, RowHistory

PASSED: Final = "It has passed."
"""What a cleared alert says in the place of a hint."""
_RULES_OF: Final[Mapping[type[Row], tuple[Rule, ...]]] = {
    table: tuple(rule for rule in RULES if rule.table is table) for table in {rule.table for rule in RULES}
}


@dataclass(slots=True)
class _AlertState:
    """What one rule has found about one thing."""

    wrong_in_a_row: int = 0
    raised: AlertRow | None = None
    """The alert, until it is cleared."""
    env: int | None = None
    slot: int | None = None
    """Where the thing is, if it is part of an episode and ends with it."""


class AlertMonitor:
    """The rules of one run, and what they have seen."""

    def __init__(self, run: RunRow) -> None:
        self._past = RowHistory(run)
        self._states: dict[tuple[str, str], _AlertState] = {}
        """By rule and scope."""

    def take(self, row: Row) -> list[AlertRow]:
        """The alerts that this row raises or clears; those of the governor are noted and not repeated."""
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
        """What was about the episode that ended, or about the seed that is gone, is over."""
        courses = list(self._states.items())
        ended = [key for key, one in courses if one.env == row.env and slot in (None, one.slot)]
        raised = [self._states.pop(key).raised for key in ended]
        return [_cleared(alert, value=None, **_place(row)) for alert in raised if alert is not None]


def _cleared(raised: AlertRow, **changed: Any) -> AlertRow:
    return msgspec.structs.replace(raised, event="cleared", hint=PASSED, t=0.0, **changed)


def _when(row: Row) -> dict[str, Any]:
    """The columns of an alert that say when, and in which episode if it is about one."""
    match row:
        case SeedRow():
            return _place(row)
        case UpdateRow() | EpisodeRow():
            return {"iteration": row.iteration}
    return {}


def _place(row: EnvRow) -> dict[str, Any]:
    """The columns that say where in a run a row belongs."""
    return {name: getattr(row, name) for name in ("env", "episode", "attempt", "iteration", "epoch")}
