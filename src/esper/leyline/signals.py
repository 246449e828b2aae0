"""Facts (measurements of one epoch) and signals (facts with their trends), as arrays ``[env]``.

The environment measures facts; ``tamiyo.tracker`` computes signals from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Generic, TypeVar

import numpy as np

from esper.leyline.factored_actions import BoolArray, FloatArray, IntArray

HISTORY_LENGTH: Final = 5

Int = TypeVar("Int")
Float = TypeVar("Float")
Bool = TypeVar("Bool")


@dataclass(frozen=True, slots=True)
class RaceCandidate:
    """Candidate seed that was trained to the end of a race."""

    slot: int
    blueprint: int
    lead: float
    """Validation loss of the network trained without the seed, minus the loss with the seed."""
    error: float
    """Standard error of the lead."""
    cost: float
    """Compute of the seed, divided by the compute of the network."""


@dataclass(frozen=True, slots=True)
class RaceResult:
    """Result of a race between candidate seeds and the network without a new seed."""

    candidates: tuple[RaceCandidate, ...]
    """Candidates, the best first; empty if no candidate was trained to the end of the race."""
    loss: float
    """Validation loss before the race."""

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any] | None) -> RaceResult | None:
        """Return the race result from its ``dataclasses.asdict``."""
        if plain is None:
            return None
        return cls(tuple(RaceCandidate(**each) for each in plain["candidates"]), plain["loss"])


@dataclass(frozen=True, slots=True)
class _Facts(Generic[Int, Float, Bool]):
    """Measurements after one epoch; epoch 0 is the untrained host."""

    epoch: Int
    max_epochs: Int
    train_loss: Float
    """NaN at epoch 0, before any training."""
    train_score: Float
    val_loss: Float
    val_score: Float
    params: Int
    """Parameters of the host and of every seed attached to it."""
    grown_params: Int
    param_budget: Int
    host_gradient_norm: Float
    last_op: Int
    last_success: Bool
    ended: Bool
    rolled_back: Bool
    """The host diverged in this epoch; the measurements are those of the restored state."""
    minibatches: Int
    """Training minibatches since the start of the episode."""


@dataclass(frozen=True, slots=True)
class EnvFacts(_Facts[int, float, bool]):
    """Measurements of one environment after one epoch."""

    minibatches_left: float = math.nan
    """Minibatches that the rest of the compute budget allows at the present network size; NaN without one."""
    candidate_cost: float = math.nan
    """Mean compute of selectable seeds, divided by the compute of the network; NaN without a budget."""
    cost: float = math.nan
    """FLOPs of one forward pass of the present network, for a batch of fixed size; NaN where not counted."""
    race: RaceResult | None = None
    """Result of a race that was run after this epoch."""


@dataclass(frozen=True, slots=True)
class EpochFacts(_Facts[IntArray, FloatArray, BoolArray]):
    """Facts of all environments, every array ``[env]``; fields as in ``EnvFacts``."""

    minibatches_left: FloatArray
    candidate_cost: FloatArray
    cost: FloatArray
    races: tuple[RaceResult | None, ...]

    @classmethod
    def stack(cls, rows: Sequence[EnvFacts]) -> EpochFacts:
        """Return the facts of several environments as arrays."""
        names = [f.name for f in fields(cls) if f.name != "races"]
        columns = {name: np.array([getattr(row, name) for row in rows]) for name in names}
        return cls(**columns, races=tuple(row.race for row in rows))


@dataclass(frozen=True, slots=True)
class TrainingSignals:
    """Facts and their trends, every array ``[env]``, histories ``[env, 5]`` with the oldest value first."""

    facts: EpochFacts
    loss_delta: FloatArray
    """Previous minus present validation loss, positive for an improvement."""
    score_delta: FloatArray
    plateau_epochs: IntArray
    stabilised: BoolArray
    loss_history: FloatArray
    score_history: FloatArray
    best_score: FloatArray
    best_loss: FloatArray
    gain_ratio: FloatArray
    """Decrease of the loss since the last germination, divided by the decrease that the trend before it
    predicts; NaN without a germination or without a falling trend."""
