"""Observations of a policy: features, blueprint indices and masks of all environments.

Number and names of the features are derived from the feature table; a policy checkpoint stores the names. The
capacity of a policy is the number of slots in its observation. For a model with fewer slots than the
capacity, the remaining slots of the observation are empty and have no legal op.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.leyline import ActionSpace, EpochFacts, EsperError, SlotConfig, SlotTable, TrainingSignals
from esper.tamiyo.policy.action_masks import ActionMasks, compute_batch_masks
from esper.tamiyo.policy.feature_table import BASE_FEATURES, CONTEXT_FEATURES, SLOT_FEATURES, Array, Shared
from esper.tamiyo.tracker import SignalTracker

BASE_SIZE: Final = sum(len(feature.columns) for feature in BASE_FEATURES)
SLOT_SIZE: Final = sum(len(feature.columns) for feature in SLOT_FEATURES)


@cache
def _layout(num_slots: int, context: bool) -> tuple[tuple[str, ...], Array]:
    """Return the names of an observation's columns, and scale, low, high and unknown value of each."""
    columns = [(name, feature) for feature in BASE_FEATURES for name in feature.columns]
    columns += [
        (f"slot{slot}.{name}", feature)
        for slot in range(num_slots)
        for feature in SLOT_FEATURES
        for name in feature.columns
    ]
    columns += [(name, feature) for feature in CONTEXT_FEATURES * context for name in feature.columns]
    numbers = [(feature.scale, feature.low, feature.high, feature.unknown) for _, feature in columns]
    return tuple(name for name, _ in columns), np.array(numbers, dtype=np.float32).T.copy()


def get_feature_size(slot_config: SlotConfig, context: bool = False) -> int:
    """Return the number of features of an observation."""
    return len(feature_names(slot_config.num_slots, context))


def feature_names(num_slots: int, context: bool = False) -> tuple[str, ...]:
    """Return one name per column of an observation; a policy checkpoint stores the names."""
    return _layout(num_slots, context)[0]


def batch_obs_to_features(
    signals: TrainingSignals,
    reports: SlotTable,
    slot_config: SlotConfig,
    device: torch.device | str = "cpu",
    *,
    context: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the observations of all environments.

    Args:
        signals: Facts of the last epoch, and trends over the last epochs.
        reports: Slot table of all environments.
        slot_config: Names of the slots in the observation.
        device: Device of the returned tensors.
        context: Whether to append the context features.

    Returns:
        Two tensors: features ``[env, feature]`` in float32, and the blueprint index of every slot
        ``[env, slot]``, -1 for empty slots. There are 31 features, 30 more for each slot, and 6 more with
        ``context``.
    """
    num_envs, num_slots = reports.num_envs, slot_config.num_slots
    scale, low, high, unknown = _layout(num_slots, context)[1]
    shared = Shared.of(reports)
    obs: Array = np.empty((num_envs, len(scale)), dtype=np.float32)
    end = BASE_SIZE + SLOT_SIZE * num_slots
    slots = obs[:, BASE_SIZE:end].reshape(num_envs, num_slots, SLOT_SIZE)
    blocks = ((obs, BASE_FEATURES), (slots, SLOT_FEATURES), (obs[:, end:], CONTEXT_FEATURES * context))
    # Raw values beyond float32 become inf and are clipped; inf − inf is NaN and becomes ``Feature.unknown``.
    with np.errstate(over="ignore", invalid="ignore"):
        for block, table in blocks:
            column = 0
            for feature in table:
                values = feature.source(signals, reports, shared)
                values = values if values.ndim == block.ndim else values[..., None]
                block[..., column : column + values.shape[-1]] = values
                column += values.shape[-1]
    obs *= scale
    np.copyto(obs, unknown, where=np.isnan(obs))
    np.maximum(obs, low, out=obs)
    np.minimum(obs, high, out=obs)
    slots *= shared.active[:, :, None]
    features, blueprints = torch.from_numpy(obs), torch.from_numpy(reports.blueprint.copy())
    return (features, blueprints) if device == "cpu" else (features.to(device), blueprints.to(device))


# --- observations -----------------------------------------------------------------------------------


class CapacityError(EsperError):
    """Error: a model has more slots than the capacity of the policy."""


def check_capacity(num_slots: int, capacity: int) -> None:
    """Raise ``CapacityError`` if a model has more slots than the policy's capacity."""
    if num_slots > capacity:
        raise CapacityError(
            f"a policy with room for {capacity} slots cannot serve a host with {num_slots};"
            f" train one with --capacity {num_slots} or more"
        )


class Observation(NamedTuple):
    """Observation of all environments: the inputs of a policy for one decision."""

    features: Tensor
    """Scaled and clipped features ``[env, feature]``."""
    blueprint_indices: Tensor
    """Index of the blueprint in every slot ``[env, slot]``, -1 for empty slots."""
    masks: ActionMasks

    def each(self, change: Callable[[Tensor], Tensor]) -> Observation:
        """Return the observation with every tensor ``x`` replaced by ``change(x)``."""
        return Observation(change(self.features), change(self.blueprint_indices), self.masks.each(change))


class Observer:
    """Computes the observations of several environments, including trends over the last epochs.

    Args:
        num_envs: Number of environments.
        num_slots: Number of slots of the model.
        capacity: Number of slots in an observation, at least ``num_slots``.
        context: Whether to append the context features.
    """

    def __init__(self, num_envs: int, num_slots: int, capacity: int, *, context: bool = False) -> None:
        check_capacity(num_slots, capacity)
        self._slots = SlotConfig.of_count(capacity)
        self._context = context
        self._tracker = SignalTracker(num_envs)
        self._wide = SlotTable.empty(num_envs, capacity)
        self._wide.enabled[:] = False

    def reset(self) -> None:
        """Clear the trends: the next observation is the first of a new episode in every environment."""
        self._tracker.reset()

    def observe(self, facts: EpochFacts, table: SlotTable, space: ActionSpace) -> Observation:
        """Return the observation of all environments after an epoch."""
        signals = self._tracker.update(facts)
        shown = self._widened(table)
        features, blueprints = batch_obs_to_features(signals, shown, self._slots, context=self._context)
        return Observation(features, blueprints, compute_batch_masks(shown, space))

    def _widened(self, table: SlotTable) -> SlotTable:
        if table.num_slots == self._slots.num_slots:
            return table
        for name, array in table.arrays().items():
            getattr(self._wide, name)[:, : table.num_slots] = array
        return self._wide
