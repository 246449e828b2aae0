"""What a policy sees before a decision: facts and slot table in, tensors out.

A policy has room for a number of slots, its capacity. A model with fewer is shown to it with the
missing ones as empty slots in which nothing is legal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import ActionSpace, EpochFacts, SlotConfig, SlotTable
from esper.leyline.errors import EsperError
from esper.tamiyo.policy.action_masks import ActionMasks, compute_batch_masks
from esper.tamiyo.policy.observation_features import batch_obs_to_features
from esper.tamiyo.tracker import SignalTracker


class CapacityError(EsperError):
    """A model with more slots than the policy has room for."""


def check_capacity(num_slots: int, capacity: int) -> None:
    """Refuse a model that a policy cannot see all of."""
    if num_slots > capacity:
        raise CapacityError(
            f"a policy with room for {capacity} slots cannot serve a host with {num_slots};"
            f" train one with --capacity {num_slots} or more"
        )


class Observation(NamedTuple):
    """All environments at once."""

    features: Tensor
    """``[env, features]``."""
    blueprint_indices: Tensor
    """``[env, slot]``, -1 = empty."""
    masks: ActionMasks

    def to(self, device: torch.device) -> Observation:
        return Observation(self.features.to(device), self.blueprint_indices.to(device), self.masks.to(device))


class Observer:
    """Follows a vector of episodes with ``num_slots`` slots each for a policy of the given capacity."""

    def __init__(self, num_envs: int, num_slots: int, capacity: int, *, context: bool = False) -> None:
        """``context`` adds the features that tell instances apart."""
        check_capacity(num_slots, capacity)
        self._slots = SlotConfig.of_count(capacity)
        self._context = context
        self._tracker = SignalTracker(num_envs)
        self._wide = SlotTable.empty(num_envs, capacity)
        self._wide.enabled[:] = False

    def reset(self) -> None:
        """Whatever comes next is the beginning of every episode."""
        self._tracker.reset()

    def observe(self, facts: EpochFacts, table: SlotTable, space: ActionSpace) -> Observation:
        """What is to be seen after an epoch."""
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
