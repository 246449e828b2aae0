"""Reports of single slots, with names in place of indices, derived from the slot table."""

import math
from dataclasses import dataclass, fields
from typing import Any, Final

from esper.leyline.factored_actions import BLEND_IDS, DEFAULT_GAMMA, STYLE_OPERATORS, BlendOperator
from esper.leyline.rules import ActionSpace
from esper.leyline.slot_table import NEVER, SlotTable
from esper.leyline.stages import Stage


@dataclass(frozen=True, slots=True)
class SeedStateReport:
    """State of one slot; a field is ``None`` if it was not measured or the slot has no seed."""

    slot_id: str = ""
    stage: Stage = Stage.UNKNOWN
    seed_id: int | None = None
    blueprint_id: str | None = None
    style_id: str | None = None
    operator: BlendOperator | None = None
    age: int | None = None
    epochs_in_stage: int | None = None
    alpha: float | None = None
    alpha_target: float | None = None
    alpha_mode: str | None = None
    """Direction of alpha: HOLD, UP or DOWN."""
    alpha_velocity: float | None = None
    """Mean change of alpha per epoch until the end of its ramp."""
    epochs_to_target: int | None = None
    is_leaving: bool | None = None
    seed_param_count: int | None = None
    counterfactual_contribution: float | None = None
    contribution_error: float | None = None
    contribution_velocity: float | None = None
    shapley_value: float | None = None
    interaction_sum: float | None = None
    strongest_boost: float | None = None
    epochs_since_measured: int | None = None
    freshness: float | None = None
    seed_gradient_norm: float | None = None
    seed_gradient_norm_ratio: float | None = None
    gradient_health: float | None = None
    previous_health: float | None = None
    is_vanishing: bool | None = None
    is_exploding: bool | None = None
    upstream_alpha: float | None = None
    downstream_alpha: float | None = None


_SHARED: Final = {f.name for f in fields(SeedStateReport)} & {f.name for f in fields(SlotTable)}
"""Fields of a slot report that have the same name as a column of the slot table."""


def _known(value: Any) -> Any:
    return None if math.isnan(value) else value


def _flag(value: float | None) -> bool | None:
    return None if value is None else bool(value)


def freshness(epochs_since: Any) -> Any:
    """Return the freshness of a measurement: 1 in the epoch of the measurement, lower with every later epoch,
    0 if there is none.

    Args:
        epochs_since: Epochs since the measurement, ``NEVER`` if there is none; a number or an array.
    """
    return (epochs_since != NEVER) * DEFAULT_GAMMA**epochs_since


def alpha_mode(table: SlotTable, env: int, slot: int) -> str:
    """Return HOLD, UP or DOWN if the alpha of a slot is constant, rising or falling."""
    if not table.ramping[env, slot]:
        return "HOLD"
    return "UP" if table.alpha_target[env, slot] > table.alpha_from[env, slot] else "DOWN"


def report_slot(table: SlotTable, env: int, slot: int, space: ActionSpace) -> SeedStateReport:
    """Return the report of one slot; for an empty slot it has only slot id, stage and epochs in stage."""
    column = {name: _known(array[env, slot].item()) for name, array in table.arrays().items()}
    slot_id, stage = space.slot_config.slot_ids[slot], Stage(column["stage"])
    since = column["epochs_since_measured"]
    column |= {"stage": stage, "epochs_since_measured": None if since == NEVER else since}
    if not table.occupied[env, slot]:
        return SeedStateReport(slot_id=slot_id, stage=stage, epochs_in_stage=column["epochs_in_stage"])
    left = column["ramp_epochs"] - column["ramp_elapsed"] if table.ramping[env, slot] else 0
    alpha = table.alpha[env] * table.in_forward[env]
    return SeedStateReport(
        **{name: column[name] for name in _SHARED},
        slot_id=slot_id,
        blueprint_id=space.blueprint_names[column["blueprint"]],
        style_id=BLEND_IDS[column["style"]],
        operator=STYLE_OPERATORS[column["style"]],
        alpha_mode=alpha_mode(table, env, slot),
        alpha_velocity=(column["alpha_target"] - column["alpha"]) / left if left else 0.0,
        epochs_to_target=left,
        is_leaving=column["leaving"],
        seed_param_count=column["seed_params"],
        counterfactual_contribution=column["contribution"],
        shapley_value=column["shapley"],
        freshness=freshness(since),
        seed_gradient_norm=column["gradient_norm"],
        seed_gradient_norm_ratio=column["gradient_norm_ratio"],
        is_vanishing=_flag(column["vanishing"]),
        is_exploding=_flag(column["exploding"]),
        upstream_alpha=float(alpha[:slot].sum()),
        downstream_alpha=float(alpha[slot + 1 :].sum()),
    )


def report_slots(table: SlotTable, env: int, space: ActionSpace) -> list[SeedStateReport]:
    """Return the reports of all slots of one environment, upstream first."""
    return [report_slot(table, env, slot, space) for slot in range(table.num_slots)]
