"""Table of all features of an observation: source, scale, range, and value if not measured.

A feature is clip(raw value · scale, low, high); NaN, the value of a missing measurement, becomes ``unknown``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.factored_actions import NUM_OPS, STYLE_OPERATORS
from esper.leyline.reports import freshness
from esper.leyline.signals import HISTORY_LENGTH, TrainingSignals
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import IN_FORWARD, NUM_STAGES, Stage
from esper.tamiyo.tracker import loss_slope

BOUND: Final = 2.0
"""Largest absolute value of any feature of an observation."""
_MAX_RAMP: Final = 8.0
_LOG_LOSS: Final = math.log(11.0)
_TINY: Final = 1e-6


Array = NDArray[Any]


class Shared(NamedTuple):
    """Arrays ``[env, slot]`` from which several slot features are computed."""

    active: Array
    """1 for slots that are not DORMANT, else 0, in float32."""
    ramping: Array
    ramp_left: Array
    """Number of epochs until the alpha of a slot has reached its target."""
    weights: Array
    """Alpha of seeds in the forward pass, 0 for all other slots."""
    weights_so_far: Array
    """Cumulative sum of the alphas in ``weights`` over the slots, from upstream to downstream."""

    @classmethod
    def of(cls, table: SlotTable) -> Shared:
        ramping = table.ramping
        left = (table.ramp_epochs - table.ramp_elapsed) * ramping
        weights = table.alpha * _IN_FORWARD.take(table.stage)
        so_far = np.add.accumulate(weights, axis=1)
        return cls(_ACTIVE.take(table.stage), ramping, left, weights, so_far)


Source = Callable[[TrainingSignals, SlotTable, Shared], Array]


@dataclass(frozen=True, slots=True)
class Feature:
    """One or more neighbouring columns of an observation that are computed by one function."""

    names: str
    """Names of the observation columns, separated by spaces."""
    source: Source
    """Function that returns raw values, ``[env]`` or ``[env, slot]``; several columns have one more axis."""
    scale: float = 1.0
    low: float = -BOUND
    high: float = BOUND
    unknown: float = 0.0
    """Value of the feature if the raw value is NaN."""

    @property
    def columns(self) -> list[str]:
        return self.names.split()


def _numbered(name: str, count: int) -> str:
    return " ".join(f"{name}_{number}" for number in range(count))


def _log_loss(loss: Array) -> Array:
    return np.log1p(np.maximum(loss, 0.0))


def _parameter_use(s: TrainingSignals, t: SlotTable, x: Shared) -> Array:
    return np.log1p(s.facts.params) / np.log1p(np.maximum(s.facts.param_budget, 1))


def _shares(s: TrainingSignals, t: SlotTable, x: Shared) -> Array:
    """Return the shares of slots that are not empty, in TRAINING, in BLENDING and in HOLDING."""
    return np.add.reduce(_COUNTED.take(t.stage, axis=0), axis=1) / t.num_slots


_OPS: Final = np.eye(NUM_OPS, dtype=np.float32)
_STAGES: Final = np.eye(NUM_STAGES, dtype=np.float32)
_ACTIVE: Final = 1.0 - _STAGES[Stage.DORMANT]
_IN_FORWARD: Final = IN_FORWARD.astype(np.float64)
_COUNTED: Final = np.stack(
    [_ACTIVE, *_STAGES[[Stage.TRAINING, Stage.BLENDING, Stage.HOLDING]]], axis=1, dtype=np.float64
)
"""Array ``[stage, 4]`` of 0 and 1: whether a slot in that stage is not empty, is in TRAINING, is in BLENDING,
is in HOLDING."""
_OPERATORS: Final = np.array([0.5 * operator for operator in STYLE_OPERATORS], dtype=np.float32)

BASE_FEATURES: Final = (
    Feature("progress", lambda s, t, x: s.facts.epoch / s.facts.max_epochs),
    Feature("loss", lambda s, t, x: _log_loss(s.facts.val_loss), 1 / _LOG_LOSS, unknown=BOUND),
    Feature("loss_delta", lambda s, t, x: s.loss_delta, 0.5, -1.0, 1.0, unknown=-1.0),
    Feature("score", lambda s, t, x: s.facts.val_score, 0.01),
    Feature("score_delta", lambda s, t, x: s.score_delta, 0.1, -1.0, 1.0, unknown=-1.0),
    Feature("plateau", lambda s, t, x: s.plateau_epochs, 1 / 20, 0.0, 1.0),
    Feature("stabilised", lambda s, t, x: s.stabilised),
    Feature(
        _numbered("losses", HISTORY_LENGTH),
        lambda s, t, x: _log_loss(s.loss_history),
        1 / _LOG_LOSS,
        unknown=BOUND,
    ),
    Feature(_numbered("scores", HISTORY_LENGTH), lambda s, t, x: s.score_history, 0.01),
    Feature("best_score", lambda s, t, x: s.best_score, 0.01),
    Feature("best_loss", lambda s, t, x: _log_loss(s.best_loss), 1 / _LOG_LOSS, unknown=BOUND),
    Feature("parameter_use", _parameter_use),
    Feature("slot_use share_training share_blending share_holding", _shares),
    Feature("last_success", lambda s, t, x: s.facts.last_success),
    Feature(_numbered("last_op", NUM_OPS), lambda s, t, x: _OPS.take(s.facts.last_op, axis=0)),
)
"""Features of the host and of the episode, the first columns of an observation."""


def _alpha_mode(s: TrainingSignals, t: SlotTable, x: Shared) -> Array:
    """Return 0 for a constant alpha (HOLD), 0.5 for a rising alpha (UP), 1 for a falling alpha (DOWN)."""
    return x.ramping * np.where(t.alpha_target > t.alpha_from, 0.5, 1.0)


def _alpha_velocity(s: TrainingSignals, t: SlotTable, x: Shared) -> Array:
    return (t.alpha_target - t.alpha) * x.ramping / np.maximum(x.ramp_left, 1)


def _downstream(s: TrainingSignals, t: SlotTable, x: Shared) -> Array:
    return np.add.reduce(x.weights, axis=1, keepdims=True) - x.weights_so_far


SLOT_FEATURES: Final = (
    Feature("active", lambda s, t, x: x.active),
    Feature(_numbered("stage", NUM_STAGES), lambda s, t, x: _STAGES.take(t.stage, axis=0)),
    Feature("alpha", lambda s, t, x: t.alpha),
    Feature("alpha_target", lambda s, t, x: t.alpha_target),
    Feature("alpha_mode", _alpha_mode),
    Feature("alpha_velocity", _alpha_velocity, low=-1.0, high=1.0),
    Feature("time_to_target", lambda s, t, x: x.ramp_left, 1 / _MAX_RAMP, 0.0, 1.0),
    Feature("operator", lambda s, t, x: _OPERATORS.take(t.style)),
    Feature("contribution", lambda s, t, x: t.contribution, 0.1, -1.0, 1.0),
    Feature("contribution_velocity", lambda s, t, x: t.contribution_velocity, 0.1, -1.0, 1.0),
    Feature("epochs_in_stage", lambda s, t, x: t.epochs_in_stage / s.facts.max_epochs[:, None]),
    Feature("gradient_norm", lambda s, t, x: t.gradient_norm, 0.1, 0.0, 1.0),
    Feature("gradient_health", lambda s, t, x: t.gradient_health),
    Feature("previous_health", lambda s, t, x: t.previous_health),
    Feature("vanishing", lambda s, t, x: t.vanishing),
    Feature("exploding", lambda s, t, x: t.exploding),
    Feature("interaction_sum", lambda s, t, x: t.interaction_sum, 0.1, -1.0, 1.0),
    Feature("strongest_boost", lambda s, t, x: t.strongest_boost, 0.2, 0.0, 1.0),
    Feature("upstream_alpha", lambda s, t, x: x.weights_so_far - x.weights, 1 / 3, 0.0, 1.0),
    Feature("downstream_alpha", _downstream, 1 / 3, 0.0, 1.0),
    Feature("freshness", lambda s, t, x: freshness(t.epochs_since_measured)),
)
"""Features of one slot; all of them are 0 while the slot is empty."""


def _trend(s: TrainingSignals, t: SlotTable, x: Shared) -> Array:
    """Return the relative loss reduction in the rest of the episode if the loss keeps its present slope."""
    slope = loss_slope(s.loss_history, s.facts.epoch)
    return slope * (s.facts.max_epochs - s.facts.epoch) / np.maximum(s.facts.val_loss, _TINY)


def _newborn_gradient(s: TrainingSignals, t: SlotTable, x: Shared) -> Array:
    """Return ln(gradient norm of the youngest seed / gradient norm of the host); NaN without a seed."""
    ages = np.where(t.occupied, t.age, np.iinfo(np.int64).max)
    youngest = ages.argmin(axis=1)
    rows = np.arange(t.num_envs)
    ratio = np.where(t.occupied.any(axis=1), t.gradient_norm_ratio[rows, youngest], np.nan)
    return np.log(np.maximum(ratio, _TINY))


CONTEXT_FEATURES: Final = (
    Feature("trend", _trend),
    Feature(
        "gap", lambda s, t, x: (s.facts.val_loss - s.facts.train_loss) / np.maximum(s.facts.val_loss, _TINY)
    ),
    Feature("candidate_cost", lambda s, t, x: np.log2(1.0 + s.facts.candidate_cost), 0.5),
    Feature("minibatches_left", lambda s, t, x: np.log2(1.0 + s.facts.minibatches_left), 0.1),
    Feature("newborn_gradient", _newborn_gradient, 0.5),
    Feature("gain_ratio", lambda s, t, x: s.gain_ratio, 0.5),
)
"""Optional dimensionless features that distinguish task instances of different size and budget.

The used share of the budget is not among the context features, since it is the base feature ``progress``.
"""
