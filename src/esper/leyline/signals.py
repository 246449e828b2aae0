"""Facts (measurements after one epoch) and signals (facts with their trends), as arrays ``[env]``.

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
