"""Interfaces between packages that do not import each other: controllers and event sinks."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from esper.leyline.factored_actions import IntArray
from esper.leyline.rows import Row
from esper.leyline.signals import EpochFacts
from esper.leyline.slot_table import SlotTable


class PolicyOutput(NamedTuple):
    """Probabilities and value that a policy computed for one decision."""

    masked: list[bool]
    """Whether some values of a head were masked, one flag per head."""
    log_probs: list[float]
    """Log-probability of the chosen value, per head; 0 for heads without a choice."""
    op_probs: list[float]
    """Probability of every op; 0 for masked ops."""
    value: float


class Reward(NamedTuple):
    """Reward with its terms; the sum of the terms is the reward."""

    total: float
    terms: Mapping[str, float]


class EventSink(Protocol):
    """Receiver of telemetry rows: a writer, a live view, a list in a test."""

    def emit(self, row: Row) -> None:
        """Receive one telemetry row."""


class Decisions(NamedTuple):
    """Actions of all environments for one step."""

    actions: IntArray
    """Actions ``[env, 8]``."""
    outputs: Sequence[PolicyOutput] | None = None
    """Outputs of the policy, one per environment; None if the controller is not a policy."""


@runtime_checkable
class Controller(Protocol):
    """Chooses one action per environment and step; all controllers use the same environment."""

    @property
    def name(self) -> str:
        """Name of the controller in the run row."""

    def reset(self, episode: int) -> None:
        """Clear all state of the controller: a new episode begins in every environment."""

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        """Return the actions before the next epoch, given facts and slot table after the last epoch."""
