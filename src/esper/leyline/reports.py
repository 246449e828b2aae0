"""Reports of single slots with names in place of indices, derived from the slot table."""

import math
from dataclasses import dataclass

from esper.leyline.factored_actions import BLEND_IDS, DEFAULT_GAMMA, STYLE_OPERATORS, BlendOperator
from esper.leyline.lifecycle_rules import ActionSpace
from esper.leyline.slot_table import NEVER, SlotTable
from esper.leyline.stages import Stage


@dataclass(frozen=True, slots=True)
class SeedStateReport:
    """State of one slot; ``None`` means not measured, or no seed."""

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
    """HOLD, UP or DOWN."""
    alpha_velocity: float | None = None
    """Change of alpha per epoch until the end of its ramp."""
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


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _known_flag(value: float) -> bool | None:
    return None if math.isnan(value) else bool(value)


def freshness(epochs_since: int) -> float:
    """Return 1 right after a measurement, decaying with the epochs since then, 0 if never measured."""
    return 0.0 if epochs_since == NEVER else DEFAULT_GAMMA**epochs_since


def alpha_mode(table: SlotTable, env: int, slot: int) -> str:
    """Return HOLD, UP or DOWN for a constant, rising or falling alpha."""
    if not table.ramping[env, slot]:
        return "HOLD"
    return "UP" if table.alpha_target[env, slot] > table.alpha_from[env, slot] else "DOWN"


def report_slot(table: SlotTable, env: int, slot: int, space: ActionSpace) -> SeedStateReport:
    """Return the report of one slot; without a seed it has slot id, stage and epochs in stage alone."""
    at, slot_id = (env, slot), space.slot_config.slot_ids[slot]
    stage = Stage(int(table.stage[at]))
    if not table.occupied[at]:
        return SeedStateReport(slot_id=slot_id, stage=stage, epochs_in_stage=int(table.epochs_in_stage[at]))
    since = int(table.epochs_since_measured[at])
    left = int(table.ramp_epochs[at] - table.ramp_elapsed[at]) if table.ramping[at] else 0
    remaining = float(table.alpha_target[at] - table.alpha[at])
    alpha = table.alpha[env] * table.in_forward[env]
    return SeedStateReport(
        slot_id=slot_id,
        stage=stage,
        seed_id=int(table.seed_id[at]),
        blueprint_id=space.blueprint_names[int(table.blueprint[at])],
        style_id=BLEND_IDS[int(table.style[at])],
        operator=STYLE_OPERATORS[int(table.style[at])],
        age=int(table.age[at]),
        epochs_in_stage=int(table.epochs_in_stage[at]),
        alpha=float(table.alpha[at]),
        alpha_target=float(table.alpha_target[at]),
        alpha_mode=alpha_mode(table, env, slot),
        alpha_velocity=remaining / left if left else 0.0,
        epochs_to_target=left,
        is_leaving=bool(table.leaving[at]),
        seed_param_count=int(table.seed_params[at]),
        counterfactual_contribution=_known(table.contribution[at]),
        contribution_error=_known(table.contribution_error[at]),
        contribution_velocity=_known(table.contribution_velocity[at]),
        shapley_value=_known(table.shapley[at]),
        interaction_sum=_known(table.interaction_sum[at]),
        strongest_boost=_known(table.strongest_boost[at]),
        epochs_since_measured=None if since == NEVER else since,
        freshness=freshness(since),
        seed_gradient_norm=_known(table.gradient_norm[at]),
        seed_gradient_norm_ratio=_known(table.gradient_norm_ratio[at]),
        gradient_health=_known(table.gradient_health[at]),
        previous_health=_known(table.previous_health[at]),
        is_vanishing=_known_flag(table.vanishing[at]),
        is_exploding=_known_flag(table.exploding[at]),
        upstream_alpha=float(alpha[:slot].sum()),
        downstream_alpha=float(alpha[slot + 1 :].sum()),
    )


def report_slots(table: SlotTable, env: int, space: ActionSpace) -> list[SeedStateReport]:
    """Return the reports of all slots of one environment, upstream first."""
    return [report_slot(table, env, slot, space) for slot in range(table.num_slots)]
