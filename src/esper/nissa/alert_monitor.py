"""Evaluation of the alert rules: an alert is raised when the condition of its rule starts to hold, and
cleared when the condition ends.

Alerts depend only on telemetry rows, so equal rows give equal alerts. No alert rule combines rows of two
tables, so a resumed run can replay its earlier rows one table at a time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from esper.leyline.rows import AlertRow, EnvRow, EpisodeRow, Row, RunRow, SeedRow, TransitionRow, UpdateRow
from esper.leyline.stages import OCCUPIED_STAGES
from esper.nissa.alert_rules import GOVERNOR_RULES, RULES, Rule
from esper.nissa.readings import Reading, RowHistory

PASSED: Final = "It has passed."
"""Text of column ``hint`` in the row of a cleared alert."""
_RULES_OF: Final[Mapping[type[Row], tuple[Rule, ...]]] = {
    table: tuple(rule for rule in RULES if rule.table is table) for table in {rule.table for rule in RULES}
}


@dataclass(slots=True)
class _AlertState:
    """State of one alert rule for one scope: the run, a policy head, or a slot of an environment."""

    wrong_in_a_row: int = 0
    raised: AlertRow | None = None
    """Alert that the alert rule has raised for the scope and not yet cleared; None if there is none."""
    env: int | None = None
    slot: int | None = None
    """Slot of the seed that the alert is about, or None; an alert about a seed ends with the seed or the
    episode.
    """


class AlertMonitor:
    """Alert rules applied to the rows of one run, with the alerts that are open."""

    def __init__(self, run: RunRow) -> None:
        self._past = RowHistory(run)
        self._states: dict[tuple[str, str], _AlertState] = {}
        """State of each alert rule, by the name of the rule and the scope (run, policy head or slot)."""

    def take(self, row: Row) -> list[AlertRow]:
        """Return rows for the alerts that ``row`` raises or clears. An alert row of the governor is recorded
        as open, but not returned.
        """
        alerts: list[AlertRow] = []
        for rule in _RULES_OF.get(type(row), ()):
            for reading in rule.evaluate(row, self._past):
                alerts += self._evaluate(rule, reading, row)
        match row:
            case AlertRow(event="raised") if row.rule in GOVERNOR_RULES:
                self._states[row.rule, row.scope] = _AlertState(raised=row, env=row.env)
            case EpisodeRow():
                alerts += self._end_of(row, slot=None)
            case TransitionRow() if row.to_stage not in OCCUPIED_STAGES:
                alerts += self._end_of(row, slot=row.slot)
        self._past.remember(row)
        return alerts

    def _evaluate(self, rule: Rule, reading: Reading, row: Row) -> Iterator[AlertRow]:
        """Yield the row of an alert that ``reading`` raises or clears."""
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
            yield course.raised
        elif course.raised is not None and not reading.wrong:
            yield _cleared(course.raised, value=reading.value, limit=reading.limit, **_when(row))
            course.raised = None

    def _end_of(self, row: EpisodeRow | TransitionRow, slot: int | None) -> list[AlertRow]:
        """Return rows that clear the alerts of an episode that has ended or, given ``slot``, of the seed that
        left the slot."""
        courses = self._states.items()
        ended = [key for key, one in courses if one.env == row.env and slot in (None, one.slot)]
        raised = [self._states.pop(key).raised for key in ended]
        return [_cleared(alert, value=None, **_place(row)) for alert in raised if alert is not None]


def _cleared(raised: AlertRow, **changed: Any) -> AlertRow:
    return msgspec.structs.replace(raised, event="cleared", hint=PASSED, t=0.0, **changed)


def _when(row: Row) -> dict[str, Any]:
    """Return the columns of an alert row that state its time: the iteration, and for a seed row also
    environment, episode and epoch.
    """
    match row:
        case SeedRow():
            return _place(row)
        case UpdateRow() | EpisodeRow():
            return {"iteration": row.iteration}
    return {}


def _place(row: EnvRow) -> dict[str, Any]:
    """Return environment, episode, attempt, iteration and epoch of a row as columns for an alert row."""
    return {name: getattr(row, name) for name in ("env", "episode", "attempt", "iteration", "epoch")}
