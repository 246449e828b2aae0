"""Event sink of a run: every row is checked by the alert rules, then written.

An alert raises the level of detail of the next epochs or iterations, and writes a diagnostics file.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from esper.karn.run import read_rows
from esper.leyline import rows as tables
from esper.leyline.thresholds import DETAIL_EPOCHS, DETAIL_ITERATIONS
from esper.nissa.alert_monitor import AlertMonitor
from esper.nissa.alert_rules import MACHINE_RULES
from esper.nissa.writer import RunWriter

REPLAYED: Final = (tables.EpisodeRow, tables.UpdateRow, tables.ResourceRow)
"""Row types that alert rules still read after the iteration in which the rows were written."""
REPLAYED_EPISODE: Final = (tables.SeedRow, tables.TransitionRow, tables.ResourceRow)
"""Row types that alert rules read until the end of the episode; they are replayed when a run is resumed
within an episode."""


class RowSink:
    """Event sink of a run: checks every row by the alert rules, and writes the row and the alerts that it
    raises."""

    def __init__(self, run: tables.RunRow, writer: RunWriter) -> None:
        self._writer = writer
        self._run = run
        self._watch = AlertMonitor(run)
        self._level: tables.Detail = writer.detail
        self._left = 0
        """Number of epochs or iterations still to be written in full detail."""
        writer.on_resources = self._check_resources

    def _check_resources(self, row: tables.ResourceRow) -> None:
        """Write the alerts that a resource row raises; the row itself is written by the run's writer."""
        for alert in self._watch.take(row):
            self._writer.emit(alert)

    def emit(self, row: tables.Row) -> None:
        """Write one row of an episode, and the alerts that the row raises."""
        rows = [row, *self._watch.take(row)]
        self._pass_on(rows, rows, row, DETAIL_EPOCHS)

    def emit_iteration(self, collected: Sequence[tables.Row], update: tables.UpdateRow) -> None:
        """Write all rows of an iteration, in full detail if an alert about the whole run was raised.

        Alerts about single episodes do not raise the level of detail, because exploration produces many
        failing seeds.
        """
        rows = [*collected, update]
        alerts = [alert for row in rows for alert in self._watch.take(row)]
        of_run = [alert for alert in alerts if alert.env is None]
        self._pass_on([*rows, *alerts], of_run, update, DETAIL_ITERATIONS)

    def _pass_on(
        self, rows: Sequence[tables.Row], alerts: Sequence[tables.Row], last: tables.Row, span: int
    ) -> None:
        """Write ``rows``; if one of ``alerts`` raises the level of detail, write the next ``span`` epochs or
        iterations in full detail."""
        raised = [row for row in alerts if isinstance(row, tables.AlertRow) and _raises_detail(row)]
        if raised:
            self._left = span
            self._diagnose(raised, last)
        self._writer.detail = "full" if self._left else self._level
        for row in rows:
            self._writer.emit(row)
        if self._left and isinstance(last, tables.EpochRow | tables.UpdateRow):
            self._left -= 1

    def _diagnose(self, raised: Sequence[tables.AlertRow], row: tables.Row) -> None:
        """Write a diagnostics file that has the raised alerts and the row that raised them."""
        first = raised[0]
        where = f"env{first.env}-episode{first.episode}-epoch{first.epoch}"
        name = where if first.iteration is None else f"iteration-{first.iteration:05d}"
        content = {"alerts": raised, type(row).__name__: row}
        self._writer.keep(f"diagnostics/{name}.json", msgspec.json.format(msgspec.json.encode(content)))

    def begin(self, directory: Path, *, is_resumed: bool) -> None:
        """Write the run row of a new run; restore the state of the alert rules and the level of detail of a
        resumed run from its rows."""
        if not is_resumed:
            with self._writer.iteration(0):
                self.emit(self._run)
            return
        kinds = REPLAYED_EPISODE if self._run.iterations is None else REPLAYED
        rows = [row for kind in kinds for row in read_rows(directory, kind)]
        for row in sorted(rows, key=lambda row: row.t):
            self._watch.take(row)
        iterations = [row.iteration for row in read_rows(directory, tables.UpdateRow)]
        alerts = read_rows(directory, tables.AlertRow)
        raised = [row.iteration for row in alerts if _raises_detail(row) and row.iteration]
        if iterations and raised:
            self._left = max(DETAIL_ITERATIONS - 1 - (iterations[-1] - max(raised)), 0)


def _raises_detail(alert: tables.AlertRow) -> bool:
    """Return whether the alert raises the level of detail; alerts about machine resources do not."""
    return alert.event == "raised" and alert.rule not in MACHINE_RULES
