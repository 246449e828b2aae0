"""Observations of a policy, computed from the facts of an epoch and the slot table.

The capacity of a policy is the number of slots in its observation. For a model with fewer slots than the
capacity, the remaining slots of the observation are empty and have no legal op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from esper.leyline import ActionSpace, EpochFacts, EsperError, SlotConfig, SlotTable
from esper.tamiyo.policy.action_masks import ActionMasks, compute_batch_masks
from esper.tamiyo.policy.features import batch_obs_to_features
from esper.tamiyo.tracker import SignalTracker


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
