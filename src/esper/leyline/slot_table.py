"""State of all slots of all environments, as arrays ``[env, slot]``.

``kasmina.lifecycle`` writes stages, ages and ramps; the environment writes measurements through the
``record_*`` methods; all other code only reads the slot table. Missing measurements are NaN (-1 for counts),
never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from esper.leyline.factored_actions import BoolArray, FloatArray, IntArray
from esper.leyline.stages import IN_FORWARD, IS_LIVE, IS_OCCUPIED, Stage

NEVER: Final = -1
"""Value of ``epochs_since_measured`` before the first measurement."""
NO_BLUEPRINT: Final = -1


@dataclass(slots=True)
class SlotTable:
    """Slot state as a struct of arrays, every array ``[env, slot]``."""

    enabled: BoolArray
    stage: IntArray
    seed_id: IntArray
    """Serial number of the seed within its episode, counted per environment; -1 for an empty slot."""
    blueprint: IntArray
    style: IntArray
    age: IntArray
    """Age of the seed: epochs since germination."""
    epochs_in_stage: IntArray

    alpha: FloatArray
    alpha_from: FloatArray
    alpha_target: FloatArray
    ramp_epochs: IntArray
    ramp_elapsed: IntArray
    ramp_curve: IntArray
    leaving: BoolArray
    """The seed is being pruned: its alpha ramps down to 0."""

    seed_params: IntArray
    contribution: FloatArray
    """Contribution: points of score lost when only this slot is off; NaN if not measured."""
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
    """Flags ``vanishing`` and ``exploding`` are 1.0 or 0.0, NaN if not measured."""
    exploding: FloatArray

    @classmethod
    def empty(cls, num_envs: int, num_slots: int) -> Self:
        """Return a table of dormant, enabled slots."""
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
        """Return every array of the slot table by field name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def copy(self) -> SlotTable:
        return SlotTable(**{name: array.copy() for name, array in self.arrays().items()})

    def assign(self, other: SlotTable) -> None:
        """Copy the values of the table ``other`` into the arrays of this table."""
        for name, array in other.arrays().items():
            getattr(self, name)[...] = array

    def clear(self, env: int, slot: int) -> None:
        """Reset all columns of one slot, except ``enabled``, to the values of an empty slot."""
        for name, array in self.arrays().items():
            if name != "enabled":
                array[env, slot] = _BLANK[name]

    def plain(self) -> dict[str, Any]:
        """Return every column of the slot table as nested lists, for JSON."""
        return {name: array.tolist() for name, array in self.arrays().items()}

    @classmethod
    def from_plain(cls, columns: dict[str, Any]) -> SlotTable:
        """Return the slot table whose ``plain()`` is ``columns``."""
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
        """Slots whose alpha has not reached its target yet."""
        return self.in_forward & (self.ramp_elapsed < self.ramp_epochs)

    @property
    def measured(self) -> BoolArray:
        """Slots with a measured contribution."""
        return ~np.isnan(self.contribution)

    def record_contribution(self, env: int, slot: int, value: float, error: float) -> None:
        """Store a measured contribution; its velocity is an EMA (0.7 old, 0.3 new) of the changes."""
        previous = self.contribution[env, slot]
        if not np.isnan(previous):
            old = self.contribution_velocity[env, slot]
            change = value - previous
            self.contribution_velocity[env, slot] = change if np.isnan(old) else 0.7 * old + 0.3 * change
        self.contribution[env, slot] = value
        self.contribution_error[env, slot] = error
        self.epochs_since_measured[env, slot] = 0

    def record_gradients(
        self,
        env: int,
        slot: int,
        *,
        norm: float,
        ratio: float,
        health: float,
        vanishing: bool,
        exploding: bool,
    ) -> None:
        """Store the gradient statistics of an epoch; the last health moves to ``previous_health``."""
        self.previous_health[env, slot] = self.gradient_health[env, slot]
        self.gradient_norm[env, slot] = norm
        self.gradient_norm_ratio[env, slot] = ratio
        self.gradient_health[env, slot] = health
        self.vanishing[env, slot] = float(vanishing)
        self.exploding[env, slot] = float(exploding)


_DEFAULTS: Final[Mapping[str, bool | int | float]] = {"BoolArray": False, "IntArray": 0, "FloatArray": np.nan}
_BLANK: Final[Mapping[str, bool | int | float]] = (
    {field.name: _DEFAULTS[str(field.type)] for field in fields(SlotTable)}
    | {"enabled": True, "stage": int(Stage.DORMANT), "seed_id": -1, "blueprint": NO_BLUEPRINT}
    | {"alpha": 0.0, "alpha_from": 0.0, "alpha_target": 0.0, "epochs_since_measured": NEVER}
)
"""Value of every slot-table column in a slot without a seed."""
