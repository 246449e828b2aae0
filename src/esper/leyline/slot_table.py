"""Slot table: the state of all slots of all environments, as arrays ``[env, slot]``.

In the slot table, ``kasmina.lifecycle`` writes stages, ages and ramps; environments write measurements
through the ``record_*`` methods; all other code only reads. Measurements that are missing in the slot table
are NaN (-1 for counts), never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from esper.leyline.factored_actions import (
    CANONICAL_ACTION,
    NUM_OPS,
    BoolArray,
    FloatArray,
    Head,
    IntArray,
    LifecycleOp,
)
from esper.leyline.rules import LifecycleRules
from esper.leyline.stages import IN_FORWARD, IS_LIVE, IS_OCCUPIED, Stage

NEVER: Final = -1
"""Value of ``epochs_since_measured`` before the first measurement."""
NO_BLUEPRINT: Final = -1


class GradientStatistics(NamedTuple):
    """Statistics of a seed's gradients; ``health`` is 1 if the gradient of no tensor vanishes or explodes."""

    norm: float
    health: float
    vanishing: bool
    exploding: bool


@dataclass(slots=True)
class SlotTable:
    """State of all slots as a struct of arrays, every array ``[env, slot]``."""

    enabled: BoolArray
    stage: IntArray
    seed_id: IntArray
    """Serial number of the slot's seed within its episode, counted per environment; -1 for an empty slot."""
    blueprint: IntArray
    style: IntArray
    age: IntArray
    """Age of the slot's seed: epochs since germination."""
    epochs_in_stage: IntArray

    alpha: FloatArray
    alpha_from: FloatArray
    alpha_target: FloatArray
    ramp_epochs: IntArray
    ramp_elapsed: IntArray
    ramp_curve: IntArray
    leaving: BoolArray
    """Whether the slot's seed is being pruned: its alpha ramps down to 0."""

    seed_params: IntArray
    contribution: FloatArray
    """Contribution in points: score of the network minus its score with only this slot's seed off; NaN if not
    measured."""
    contribution_error: FloatArray
    contribution_velocity: FloatArray
    shapley: FloatArray
    interaction_sum: FloatArray
    strongest_boost: FloatArray
    epochs_since_measured: IntArray
    gradient_norm: FloatArray
    gradient_norm_ratio: FloatArray
    gradient_health: FloatArray
    previous_health: FloatArray
    vanishing: FloatArray
    """Flags of gradients, ``vanishing`` and ``exploding``, are 1.0 or 0.0, or NaN if not measured."""
    exploding: FloatArray

    @classmethod
    def empty(cls, num_envs: int, num_slots: int) -> Self:
        """Return a slot table in which all slots are dormant and enabled."""
        arrays: dict[str, Any] = {name: np.full((num_envs, num_slots), _BLANK[name]) for name in _BLANK}
        return cls(**arrays)

    @property
    def num_envs(self) -> int:
        return int(self.stage.shape[0])

    @property
    def num_slots(self) -> int:
        return int(self.stage.shape[1])

    def row(self, env: int) -> SlotTable:
        """Return the slot table of one environment as a view that shares memory with the whole table."""
        return SlotTable(**{name: array[env : env + 1] for name, array in self.arrays().items()})

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """Return the arrays of the slot table by column name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def copy(self) -> SlotTable:
        return SlotTable(**{name: array.copy() for name, array in self.arrays().items()})

    def assign(self, other: SlotTable) -> None:
        """Copy the values of another slot table into the arrays of this slot table."""
        for name, array in other.arrays().items():
            getattr(self, name)[...] = array

    def clear(self, env: int, slot: int) -> None:
        """Reset all columns of one slot in the slot table, except ``enabled``, to the values of an empty
        slot."""
        for name, array in self.arrays().items():
            if name != "enabled":
                array[env, slot] = _BLANK[name]

    def plain(self) -> dict[str, Any]:
        """Return every column of the slot table as nested lists, for JSON."""
        return {name: array.tolist() for name, array in self.arrays().items()}

    @classmethod
    def from_plain(cls, columns: dict[str, Any]) -> SlotTable:
        """Return the slot table for which ``plain()`` returned ``columns``."""
        table = cls.empty(len(columns["stage"]), len(columns["stage"][0]))
        for name, array in table.arrays().items():
            array[...] = columns[name]
        return table

    @property
    def in_forward(self) -> BoolArray:
        return IN_FORWARD[self.stage]

    @property
    def live(self) -> BoolArray:
        return IS_LIVE[self.stage]

    @property
    def occupied(self) -> BoolArray:
        return IS_OCCUPIED[self.stage]

    @property
    def ramping(self) -> BoolArray:
        """Mask ``[env, slot]`` of the slots whose alpha has not yet reached its target."""
        return self.in_forward & (self.ramp_elapsed < self.ramp_epochs)

    @property
    def measured(self) -> BoolArray:
        """Mask ``[env, slot]`` of the slots with a measured contribution."""
        return ~np.isnan(self.contribution)

    def record_contribution(self, env: int, slot: int, value: float, error: float) -> None:
        """Store a measured contribution; its velocity is an exponential moving average (0.7 old, 0.3 new) of
        its changes."""
        previous = self.contribution[env, slot]
        if not np.isnan(previous):
            old = self.contribution_velocity[env, slot]
            change = value - previous
            self.contribution_velocity[env, slot] = change if np.isnan(old) else 0.7 * old + 0.3 * change
        self.contribution[env, slot] = value
        self.contribution_error[env, slot] = error
        self.epochs_since_measured[env, slot] = 0

    def record_gradients(self, env: int, slot: int, found: GradientStatistics, *, ratio: float) -> None:
        """Store the gradient statistics of an epoch; the last gradient health moves to ``previous_health``.

        Args:
            env: Row of the slot table.
            slot: Column of the slot table.
            found: Gradient statistics of the slot's seed.
            ratio: Gradient norm of the seed divided by that of the host; NaN if unknown.
        """
        self.previous_health[env, slot] = self.gradient_health[env, slot]
        self.gradient_norm[env, slot] = found.norm
        self.gradient_norm_ratio[env, slot] = ratio
        self.gradient_health[env, slot] = found.health
        self.vanishing[env, slot] = float(found.vanishing)
        self.exploding[env, slot] = float(found.exploding)


_DEFAULTS: Final[Mapping[str, bool | int | float]] = {"BoolArray": False, "IntArray": 0, "FloatArray": np.nan}
_BLANK: Final[Mapping[str, bool | int | float]] = (
    {field.name: _DEFAULTS[str(field.type)] for field in fields(SlotTable)}
    | {"enabled": True, "stage": int(Stage.DORMANT), "seed_id": -1, "blueprint": NO_BLUEPRINT}
    | {"alpha": 0.0, "alpha_from": 0.0, "alpha_target": 0.0, "epochs_since_measured": NEVER}
)
"""Value of every column of the slot table for a slot without a seed."""


def legal_slots_by_op(table: SlotTable, rules: LifecycleRules) -> BoolArray:
    """Return a bool array ``[env, op, slot]``, true where an op is legal on a slot.

    Only impossible (op, slot) pairs are illegal; whether an op is useful or well timed is left to the
    controller. Only a gate can refuse a legal action.

    WAIT reads no slot and is always legal; in the array it is true at slot 0, and false at all other slots.
    """
    stage = table.stage
    blending, holding = stage == Stage.BLENDING, stage == Stage.HOLDING
    legal = np.zeros((table.num_envs, NUM_OPS, table.num_slots), dtype=np.bool_)
    legal[:, LifecycleOp.WAIT, CANONICAL_ACTION[Head.SLOT]] = True

    room = np.ones(table.num_envs, dtype=np.bool_)
    if rules.max_seeds:
        room = table.occupied.sum(axis=1) < rules.max_seeds
    legal[:, LifecycleOp.GERMINATE] = (stage == Stage.DORMANT) & table.enabled & room[:, None]
    legal[:, LifecycleOp.SET_ALPHA_TARGET] = (blending | holding) & ~table.ramping & ~table.leaving
    legal[:, LifecycleOp.PRUNE] = table.live & (table.age >= rules.min_prune_age) & ~table.leaving
    legal[:, LifecycleOp.FOSSILIZE] = holding & table.measured
    if not rules.auto_forward:
        advanceable = (stage == Stage.GERMINATED) | (stage == Stage.TRAINING) | blending
        legal[:, LifecycleOp.ADVANCE] = advanceable & ~table.leaving
    return legal
