"""The interfaces at which domains meet without importing each other."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from esper.leyline.factored_actions import IntArray
from esper.leyline.rows import Row
from esper.leyline.signals import EpochFacts
from esper.leyline.slot_table import SlotTable


class PolicyOutput(NamedTuple):
    """What a policy computed for one decision."""

    masked: list[bool]
    """Per head, whether some of its choices were masked off."""
    log_probs: list[float]
    """Per head, of what it chose; 0 where it had no choice."""
    op_probs: list[float]
    """Of every op; masked ones are 0."""
    value: float


class EventSink(Protocol):
    """Where rows go: a writer, a live view, a list in a test."""

    def emit(self, row: Row) -> None:
        """Take one row."""


class Decisions(NamedTuple):
    """The decisions of one step."""

    actions: IntArray
    """``[env, 8]``."""
    outputs: Sequence[PolicyOutput] | None = None
    """Of a policy, one per environment."""


@runtime_checkable
class Controller(Protocol):
    """Chooses one action per environment and step; all controllers use the same environment."""

    @property
    def name(self) -> str:
        """Name under which the run is recorded."""

    def reset(self, episode: int) -> None:
        """Forget everything: a new episode begins in every environment."""

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        """Decisions for the coming epoch, after the facts of the last one."""
