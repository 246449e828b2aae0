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
    """For each head, whether some of its values were masked."""
    log_probs: list[float]
    """Log-probability of the chosen value of each head; 0 for heads without a choice."""
    op_probs: list[float]
    """Probability of every op; 0 for masked ops."""
    value: float


class Reward(NamedTuple):
    """Reward with its terms; the sum of the terms is the reward."""

    total: float
    terms: Mapping[str, float]


class EventSink(Protocol):
    """Receiver of telemetry rows, such as a writer, a live view, or a list in a test."""

    def emit(self, row: Row) -> None:
        """Receive one telemetry row."""


class Decisions(NamedTuple):
    """Actions of all environments for one step."""

    actions: IntArray
    """Actions, one index per head, ``[env, head]``."""
    outputs: Sequence[PolicyOutput] | None = None
    """Outputs of the policy, one per environment; None if the controller is not a trained policy."""


@runtime_checkable
class Controller(Protocol):
    """Controller: chooses one action per environment and step."""

    @property
    def name(self) -> str:
        """Name of the controller, as written to the run row."""

    def reset(self, episode: int) -> None:
        """Reset the controller: a new episode begins in every environment."""

    def decide(self, facts: EpochFacts, table: SlotTable) -> Decisions:
        """Choose the actions of the next epoch from the measurements and the slot table after the last
        epoch."""
