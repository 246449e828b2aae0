"""Facts (measurements after one epoch) and signals (facts with their trends), as arrays ``[env]``, and the
interfaces of controllers, which decide by them, and of event sinks.

The environment measures facts; ``tamiyo.tracker`` computes signals from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from esper.leyline.factored_actions import BoolArray, FloatArray, IntArray
from esper.leyline.rows import Row
from esper.leyline.slot_table import SlotTable

HISTORY_LENGTH: Final = 5

Int = TypeVar("Int")
Float = TypeVar("Float")
Bool = TypeVar("Bool")


@dataclass(frozen=True, slots=True)
class RaceCandidate:
    """Candidate seed that was trained to the last heat of a race."""

    slot: int
    blueprint: int
    lead: float
    """Validation loss of the network trained without the seed, minus that of the network with the seed."""
    error: float
    """Standard error of ``lead``, which is a difference of two validation losses."""
    cost: float
    """Compute that the seed adds to a training step, as a fraction of a step of the network without it: of
    measured seconds, or of FLOPs (the argument ``cost`` of ``esper.grow``)."""


@dataclass(frozen=True, slots=True)
class RaceResult:
    """Result of a race between candidate seeds and the network without a new seed."""

    candidates: tuple[RaceCandidate, ...]
    """Candidates of the race, best first; empty if none was trained to the last heat."""
    loss: float
    """Validation loss of the network before the race."""

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any] | None) -> RaceResult | None:
        """Restore a race result from the dict that ``dataclasses.asdict`` made of it; None stays None."""
        if plain is None:
            return None
        return cls(tuple(RaceCandidate(**each) for each in plain["candidates"]), plain["loss"])


@dataclass(frozen=True, slots=True)
class _Facts(Generic[Int, Float, Bool]):
    """Measurements after one epoch; those of epoch 0 are of the untrained host."""

    epoch: Int
    max_epochs: Int
    train_loss: Float
    """Training loss of the epoch; NaN if unknown, and at epoch 0."""
    train_score: Float
    val_loss: Float
    val_score: Float
    params: Int
    """Number of parameters of the host and of all attached seeds."""
    grown_params: Int
    param_budget: Int
    host_gradient_norm: Float
    last_op: Int
    last_success: Bool
    ended: Bool
    rolled_back: Bool
    """Whether the host diverged in this epoch and was restored to an earlier state, to which the measurements
    then belong."""
    minibatches: Int
    """Number of training minibatches since the start of the episode."""
    minibatches_left: Float
    candidate_cost: Float
    cost: Float


@dataclass(frozen=True, slots=True)
class EnvFacts(_Facts[int, float, bool]):
    """Measurements of one environment after one epoch."""

    minibatches_left: float = math.nan
    """Number of minibatches that the rest of the compute budget allows at the present network size; NaN
    without a budget."""
    candidate_cost: float = math.nan
    """Mean compute of training a seed, over all seeds that can be planted, divided by the compute of training
    the network; NaN without a budget, or if no seed can be planted.
    """
    cost: float = math.nan
    """FLOPs of one forward pass of the present network, for a batch of fixed size; NaN if not counted."""
    race: RaceResult | None = None
    """Result of the race that was run after this epoch; None if there was no race."""


@dataclass(frozen=True, slots=True)
class EpochFacts(_Facts[IntArray, FloatArray, BoolArray]):
    """Measurements of all environments after one epoch, every array ``[env]``; fields as in ``EnvFacts``."""

    races: tuple[RaceResult | None, ...]

    @classmethod
    def stack(cls, rows: Sequence[EnvFacts]) -> EpochFacts:
        """Return the measurements of several environments as arrays ``[env]``."""
        names = [f.name for f in fields(cls) if f.name != "races"]
        columns = {name: np.array([getattr(row, name) for row in rows]) for name in names}
        return cls(**columns, races=tuple(row.race for row in rows))


@dataclass(frozen=True, slots=True)
class TrainingSignals:
    """Measurements and their trends, every array ``[env]``; histories are ``[env, 5]``, of the last five
    epochs, oldest first."""

    facts: EpochFacts
    loss_delta: FloatArray
    """Validation loss of the previous epoch minus the present one, positive for an improvement."""
    score_delta: FloatArray
    plateau_epochs: IntArray
    stabilised: BoolArray
    loss_history: FloatArray
    score_history: FloatArray
    best_score: FloatArray
    best_loss: FloatArray
    gain_ratio: FloatArray
    """Decrease of the loss since the last germination, divided by the decrease that the trend before that
    germination predicts; NaN without a germination or without a falling trend."""


# --- interfaces between packages ----------------------------------------------------------------------------


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
