"""Where the rows of a run go: past the alert rules, to the writer.

An alert raises the level of detail for a while, and leaves a file with what was known when it was raised.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from esper.karn.run import read_rows
from esper.leyline.events import (
    AlertRow,
    Detail,
    EpisodeRow,
    EpochRow,
    ResourceRow,
    Row,
    RunRow,
    SeedRow,
    TransitionRow,
    UpdateRow,
)
from esper.leyline.limits import DETAIL_EPOCHS, DETAIL_ITERATIONS
from esper.nissa.alert_monitor import AlertMonitor
from esper.nissa.alert_rules import MACHINE_RULES
from esper.nissa.writer import RunWriter

REPLAYED: Final = (EpisodeRow, UpdateRow, ResourceRow)
"""The rows that rules remember from one iteration to the next."""
REPLAYED_EPISODE: Final = (SeedRow, TransitionRow, ResourceRow)
"""Those that they remember within an episode, where a run is taken up in the middle of one."""


class Telemetry:
    """The sink of a run: everything that is emitted is checked by the alert rules and written."""

    def __init__(self, run: RunRow, writer: RunWriter) -> None:
        self._writer = writer
        self._run = run
        self._watch = AlertMonitor(run)
        self._level: Detail = writer.detail
        self._left = 0
        """How many more epochs or iterations are written in full."""
        writer.on_resources = self._check_resources

    def _check_resources(self, row: ResourceRow) -> None:
        """Pass on what a resource row raises; the writer has taken the row itself."""
        for alert in self._watch.take(row):
            self._writer.emit(alert)

    def emit(self, row: Row) -> None:
        """Take one row of an episode; what it raises follows it."""
        alerts = self._watch.take(row)
        self._pass_on([row], alerts, [row, *alerts], DETAIL_EPOCHS, last=isinstance(row, EpochRow))

    def emit_iteration(self, collected: Sequence[Row], update: UpdateRow) -> None:
        """Take all rows of an iteration; an alert about the run lets all of them be written in full.

        Not one about a single episode: a policy that explores plants many a seed that does not thrive.
        """
        rows = [*collected, update]
        alerts = [alert for row in rows for alert in self._watch.take(row)]
        grave = [alert for alert in alerts if alert.env is None]
        self._pass_on(rows, alerts, grave, DETAIL_ITERATIONS, last=True)

    def _pass_on(
        self, rows: Sequence[Row], alerts: Sequence[AlertRow], grave: Sequence[Row], span: int, *, last: bool
    ) -> None:
        raised = [row for row in grave if isinstance(row, AlertRow) and _raises_detail(row)]
        if raised:
            self._left = span
            self._diagnose(raised, rows[-1])
        self._writer.detail = "full" if self._left else self._level
        for row in (*rows, *alerts):
            self._writer.emit(row)
        if last and self._left:
            self._left -= 1

    def _diagnose(self, raised: Sequence[AlertRow], row: Row) -> None:
        """One file with the alerts and the row that raised them."""
        first = raised[0]
        where = f"env{first.env}-episode{first.episode}-epoch{first.epoch}"
        name = where if first.iteration is None else f"iteration-{first.iteration:05d}"
        content = {"alerts": raised, type(row).__name__: row}
        self._writer.keep(f"diagnostics/{name}.json", msgspec.json.format(msgspec.json.encode(content)))

    def replay(self, directory: Path) -> None:
        """Take up a run where it was left: its rules and its level of detail as they were then."""
        kinds = REPLAYED_EPISODE if self._run.iterations is None else REPLAYED
        rows = [row for kind in kinds for row in read_rows(directory, kind)]
        for row in sorted(rows, key=lambda row: row.t):
            self._watch.take(row)
        iterations = [row.iteration for row in read_rows(directory, UpdateRow)]
        alerts = read_rows(directory, AlertRow)
        raised = [row.iteration for row in alerts if _raises_detail(row) and row.iteration]
        if iterations and raised:
            self._left = max(DETAIL_ITERATIONS - 1 - (iterations[-1] - max(raised)), 0)


def _raises_detail(alert: AlertRow) -> bool:
    """What the machine does says nothing about the run, and must not change what is written of it."""
    return alert.event == "raised" and alert.rule not in MACHINE_RULES
