"""Functions that return training signals with known values, and observations by column name."""

from dataclasses import replace
from typing import Any

import numpy as np

from esper.leyline import OP_PRUNE, SlotConfig, SlotTable, TrainingSignals
from esper.leyline.slot_table import FloatArray
from esper.tamiyo.policy.features import batch_obs_to_features, feature_names
from tests.leyline.building import facts_of

USUAL = {
    "params": 999,
    "param_budget": 9999,
    "last_op": OP_PRUNE,
    "last_success": False,
    "train_loss": 6.0,
    "minibatches_left": 1023.0,
    "candidate_cost": 0.75,
    "loss_delta": 0.5,
    "score_delta": -3.0,
    "plateau_epochs": 4,
    "stabilised": True,
    "loss_history": [10.0, 9.0, 8.0, 7.0, 6.0],
    "score_history": [10.0, 20.0, 30.0, 40.0, 50.0],
    "best_score": 70.0,
    "best_loss": 6.0,
    "gain_ratio": 1.5,
}


def signals_of(num_envs: int = 1, **changes: Any) -> TrainingSignals:
    """Return training signals that are equal in every environment; arguments override default values."""
    return arranged(
        {name: np.array([value] * num_envs) for name, value in (USUAL | changes).items()}, num_envs
    )


def arranged(columns: dict[str, Any], num_envs: int) -> TrainingSignals:
    """Return training signals with the given fields; all other fields have default values."""
    facts = facts_of(epoch=5, loss=9.0, score=62.5, num_envs=num_envs)
    own = {name: columns.pop(name) for name in [*columns] if hasattr(facts, name)}
    return TrainingSignals(facts=replace(facts, **own), **columns)


def observe(
    table: SlotTable, signals: TrainingSignals | None = None
) -> tuple[list[dict[str, float]], list[list[int]]]:
    """Return the features of each environment by column name, and the blueprint indices."""
    signals = signals or signals_of(table.num_envs)
    obs, blueprints = batch_obs_to_features(signals, table, SlotConfig.of_count(table.num_slots))
    names = feature_names(table.num_slots)
    rows = [dict(zip(names, row, strict=True)) for row in obs.tolist()]
    return rows, blueprints.tolist()


MEASUREMENTS = (
    "contribution",
    "contribution_velocity",
    "interaction_sum",
    "strongest_boost",
    "gradient_norm",
    "gradient_health",
    "previous_health",
    "vanishing",
    "exploding",
)
"""Columns of the slot table that can have extreme values after a seed diverged."""
FLAGS = ("vanishing", "exploding")
EXTREMES = (np.nan, np.inf, -np.inf, 1e300, -1e300, 1e38, 0.0, -0.5, 0.7, 30.0)


def wild(rng: np.random.Generator, *shape: int) -> FloatArray:
    """Return an array of random numbers from ``EXTREMES``, such as NaN and infinity."""
    return rng.choice(EXTREMES, shape)


def wild_signals(rng: np.random.Generator, num_envs: int) -> TrainingSignals:
    """Return training signals with random extreme values."""
    floats = ("val_loss", "loss_delta", "val_score", "score_delta", "best_score", "best_loss")
    floats += ("train_loss", "minibatches_left", "candidate_cost", "gain_ratio")
    columns = {name: wild(rng, num_envs) for name in floats} | {
        "loss_history": wild(rng, num_envs, 5),
        "score_history": wild(rng, num_envs, 5),
        "epoch": rng.integers(0, 21, num_envs),
        "plateau_epochs": rng.integers(0, 99, num_envs),
        "stabilised": rng.random(num_envs) < 0.5,
        "params": rng.integers(0, 10**9, num_envs),
        "param_budget": rng.integers(0, 10**6, num_envs),
        "last_op": rng.integers(0, 6, num_envs),
        "last_success": rng.random(num_envs) < 0.5,
    }
    return arranged(columns, num_envs)
