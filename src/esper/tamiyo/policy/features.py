"""The observation: one declarative table of features, and the function that fills it in.

Every feature is a raw value times a scale, clipped to a range. What was not measured is NaN in the
slot table and reads as the feature's ``unknown`` value. Sizes and names, and so what a checkpoint
is bound to, are derived from ``BASE_FEATURES`` and ``SLOT_FEATURES``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline import DEFAULT_GAMMA, NUM_OPS, NUM_STAGES, STYLE_OPERATORS, SlotConfig, SlotTable
from esper.leyline.signals import HISTORY_LENGTH, TrainingSignals
from esper.leyline.slot_table import NEVER
from esper.leyline.stages import Stage

BOUND: Final = 2.0
"""No feature ever leaves ±BOUND."""
_MAX_RAMP: Final = 8.0
_LOG_LOSS: Final = math.log(11.0)


Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Feature:
    """``width`` neighbouring columns of the observation."""

    name: str
    source: Callable[[TrainingSignals, SlotTable], Any]
    """Raw values, ``[env]`` for the base and ``[env, slot]`` for slots, plus ``[width]`` if above 1."""
    scale: float = 1.0
    low: float = -BOUND
    high: float = BOUND
    unknown: float = 0.0
    """What an unmeasured value reads as."""
    width: int = 1


def _log_loss(loss: Array) -> Array:
    return np.log1p(np.maximum(loss, 0.0))


def _parameter_use(signals: TrainingSignals, table: SlotTable) -> Array:
    return np.log1p(signals.params) / np.log1p(np.maximum(signals.param_budget, 1))


def _share_of(stage: Stage) -> Callable[[TrainingSignals, SlotTable], Array]:
    return lambda s, t: (t.stage == stage).mean(axis=1)


_OPS: Final = np.eye(NUM_OPS, dtype=np.float32)
_STAGES: Final = np.eye(NUM_STAGES, dtype=np.float32)
_OPERATORS: Final = np.array([0.5 * operator for operator in STYLE_OPERATORS], dtype=np.float32)

BASE_FEATURES: Final = (
    Feature("progress", lambda s, t: s.epoch / s.max_epochs),
    Feature("loss", lambda s, t: _log_loss(s.val_loss), 1 / _LOG_LOSS, unknown=BOUND),
    Feature("loss_delta", lambda s, t: s.loss_delta, 0.5, -1.0, 1.0, unknown=-1.0),
    Feature("score", lambda s, t: s.val_score, 0.01),
    Feature("score_delta", lambda s, t: s.score_delta, 0.1, -1.0, 1.0, unknown=-1.0),
    Feature("plateau", lambda s, t: s.plateau_epochs, 1 / 20, 0.0, 1.0),
    Feature("stabilised", lambda s, t: s.stabilised),
    Feature(
        "losses", lambda s, t: _log_loss(s.loss_history), 1 / _LOG_LOSS, unknown=BOUND, width=HISTORY_LENGTH
    ),
    Feature("scores", lambda s, t: s.score_history, 0.01, width=HISTORY_LENGTH),
    Feature("best_score", lambda s, t: s.best_score, 0.01),
    Feature("best_loss", lambda s, t: _log_loss(s.best_loss), 1 / _LOG_LOSS, unknown=BOUND),
    Feature("parameter_use", _parameter_use),
    Feature("slot_use", lambda s, t: (t.stage != Stage.DORMANT).mean(axis=1)),
    Feature("share_training", _share_of(Stage.TRAINING)),
    Feature("share_blending", _share_of(Stage.BLENDING)),
    Feature("share_holding", _share_of(Stage.HOLDING)),
    Feature("last_success", lambda s, t: s.last_success),
    Feature("last_op", lambda s, t: _OPS[s.last_op], width=NUM_OPS),
)
"""The host as a whole."""


def _alpha_mode(signals: TrainingSignals, table: SlotTable) -> Array:
    """HOLD 0, UP 0.5, DOWN 1."""
    return table.ramping * np.where(table.alpha_target > table.alpha_from, 0.5, 1.0)


def _ramp_left(signals: TrainingSignals, table: SlotTable) -> Array:
    return (table.ramp_epochs - table.ramp_elapsed) * table.ramping


def _alpha_velocity(signals: TrainingSignals, table: SlotTable) -> Array:
    left = _ramp_left(signals, table)
    return (table.alpha_target - table.alpha) * (left > 0) / np.maximum(left, 1)


def _freshness(signals: TrainingSignals, table: SlotTable) -> Array:
    since = table.epochs_since_measured
    return (since != NEVER) * DEFAULT_GAMMA**since


def _upstream(signals: TrainingSignals, table: SlotTable) -> Array:
    weights = table.alpha * table.in_forward
    return weights.cumsum(axis=1) - weights


def _downstream(signals: TrainingSignals, table: SlotTable) -> Array:
    weights = table.alpha * table.in_forward
    return weights.sum(axis=1, keepdims=True) - weights.cumsum(axis=1)


SLOT_FEATURES: Final = (
    Feature("active", lambda s, t: 1.0),
    Feature("stage", lambda s, t: _STAGES[t.stage], width=NUM_STAGES),
    Feature("alpha", lambda s, t: t.alpha),
    Feature("alpha_target", lambda s, t: t.alpha_target),
    Feature("alpha_mode", _alpha_mode),
    Feature("alpha_velocity", _alpha_velocity, low=-1.0, high=1.0),
    Feature("time_to_target", _ramp_left, 1 / _MAX_RAMP, 0.0, 1.0),
    Feature("operator", lambda s, t: _OPERATORS[t.style]),
    Feature("contribution", lambda s, t: t.contribution, 0.1, -1.0, 1.0),
    Feature("contribution_velocity", lambda s, t: t.contribution_velocity, 0.1, -1.0, 1.0),
    Feature("epochs_in_stage", lambda s, t: t.epochs_in_stage / s.max_epochs[:, None]),
    Feature("gradient_norm", lambda s, t: t.gradient_norm, 0.1, 0.0, 1.0),
    Feature("gradient_health", lambda s, t: t.gradient_health),
    Feature("previous_health", lambda s, t: t.previous_health),
    Feature("vanishing", lambda s, t: t.vanishing),
    Feature("exploding", lambda s, t: t.exploding),
    Feature("interaction_sum", lambda s, t: t.interaction_sum, 0.1, -1.0, 1.0),
    Feature("strongest_boost", lambda s, t: t.strongest_boost, 0.2, 0.0, 1.0),
    Feature("upstream_alpha", _upstream, 1 / 3, 0.0, 1.0),
    Feature("downstream_alpha", _downstream, 1 / 3, 0.0, 1.0),
    Feature("freshness", _freshness),
)
"""One slot; all of it reads zero while the slot is empty."""


class _Layout(NamedTuple):
    """Columns of every feature, and per column of the whole observation the numbers of its feature."""

    base: tuple[tuple[Feature, int | slice], ...]
    slot: tuple[tuple[Feature, int | slice], ...]
    names: tuple[str, ...]
    scale: Array
    low: Array
    high: Array
    unknown: Array


def _columns(features: tuple[Feature, ...]) -> tuple[tuple[Feature, int | slice], ...]:
    placed: list[tuple[Feature, int | slice]] = []
    at = 0
    for feature in features:
        placed.append((feature, at if feature.width == 1 else slice(at, at + feature.width)))
        at += feature.width
    return tuple(placed)


def _expand(features: tuple[Feature, ...]) -> list[tuple[str, Feature]]:
    """One entry per column."""
    return [
        (f.name if f.width == 1 else f"{f.name}_{index}", f) for f in features for index in range(f.width)
    ]


BASE_SIZE: Final = len(_expand(BASE_FEATURES))
SLOT_SIZE: Final = len(_expand(SLOT_FEATURES))


@cache
def _layout(num_slots: int) -> _Layout:
    columns = _expand(BASE_FEATURES)
    columns += [(f"slot{n}.{name}", f) for n in range(num_slots) for name, f in _expand(SLOT_FEATURES)]

    def per_column(field: str) -> Array:
        return np.array([getattr(feature, field) for _, feature in columns], dtype=np.float32)

    return _Layout(
        base=_columns(BASE_FEATURES),
        slot=_columns(SLOT_FEATURES),
        names=tuple(name for name, _ in columns),
        scale=per_column("scale"),
        low=per_column("low"),
        high=per_column("high"),
        unknown=per_column("unknown"),
    )


def get_feature_size(slot_config: SlotConfig) -> int:
    """Length of one observation."""
    return BASE_SIZE + SLOT_SIZE * slot_config.num_slots


def feature_names(num_slots: int) -> tuple[str, ...]:
    """One name per column; a checkpoint is bound to them."""
    return _layout(num_slots).names


def batch_obs_to_features(
    signals: TrainingSignals,
    reports: SlotTable,
    slot_config: SlotConfig,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Observations ``[env, 31 + 30·slots]`` float32, and blueprint indices ``[env, slot]``, -1 = empty."""
    layout = _layout(slot_config.num_slots)
    num_envs = reports.num_envs
    obs: Array = np.empty((num_envs, len(layout.names)), dtype=np.float32)
    slots = obs[:, BASE_SIZE:].reshape(num_envs, slot_config.num_slots, SLOT_SIZE)
    with np.errstate(over="ignore"):  # what float32 cannot hold is infinite, and reads as the bound
        for feature, columns in layout.base:
            obs[:, columns] = feature.source(signals, reports)
        for feature, columns in layout.slot:
            slots[:, :, columns] = feature.source(signals, reports)
    obs *= layout.scale
    np.copyto(obs, layout.unknown, where=np.isnan(obs))
    np.clip(obs, layout.low, layout.high, out=obs)
    slots *= (reports.stage != Stage.DORMANT)[:, :, None]
    return torch.from_numpy(obs).to(device), torch.from_numpy(reports.blueprint.copy()).to(device)
