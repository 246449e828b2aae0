"""Decisions of a controller, and the log of its inputs from which its state can be rebuilt."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from esper.leyline.factored_actions import IntArray
from esper.leyline.protocols import Controller
from esper.leyline.signals import EnvFacts, EpochFacts, RaceResult
from esper.leyline.slot_table import SlotTable


class ControllerLog:
    """Log of everything that a controller has decided on; the state of a controller itself is not saved.

    Args:
        controller: Controller of one network.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.name = controller.name
        self._decided = 0
        """Number of epochs that the controller has decided on since its last reset."""
        self.entries: list[dict[str, Any]] = []
        """Facts and slot table of every epoch that the controller has decided on, as plain values."""

    def decide(self, facts: EnvFacts, table: SlotTable) -> IntArray:
        """Return the actions of the controller, and add its inputs to the log."""
        self.entries.append({"facts": asdict(facts), "table": table.plain()})
        return self._decide(facts, table)

    def _decide(self, facts: EnvFacts, table: SlotTable) -> IntArray:
        self._decided += 1
        return self._controller.decide(EpochFacts.stack([facts]), table).actions

    def load(self, entries: list[dict[str, Any]]) -> None:
        """Replace the log, and rebuild the state of the controller."""
        self.entries[:] = entries
        self._decided = -1
        self.rebuild()

    def rebuild(self) -> None:
        """Reset the controller and let it decide on all epochs of the log again, if it decided on others."""
        if self._decided != len(self.entries):
            self._controller.reset(0)
            self._decided = 0
            for entry in self.entries:
                race = RaceResult.from_plain(entry["facts"]["race"])
                facts = EnvFacts(**{**entry["facts"], "race": race})
                self._decide(facts, SlotTable.from_plain(entry["table"]))
