"""Gates between stages: each gate returns the names of the checks that passed and failed."""

from collections.abc import Mapping

import numpy as np

from esper.leyline import ActionSpace, GateVerdict, LifecycleRules, SlotTable, Stage
from esper.leyline.thresholds import CONFIDENCE_Z, MIN_GRADIENT_HEALTH


def _verdict(gate: str, checks: Mapping[str, bool]) -> GateVerdict:
    passed = tuple(name for name, ok in checks.items() if ok)
    failed = tuple(name for name, ok in checks.items() if not ok)
    return GateVerdict(gate, passed, failed)


def g0_valid(space: ActionSpace, slot: int, blueprint: int) -> GateVerdict:
    """Gate before germination: slot and blueprint exist, and the blueprint fits the slot."""
    return _verdict(
        "G0",
        {
            "slot_known": 0 <= slot < space.slot_config.num_slots,
            "blueprint_selectable": blueprint in space.blueprints,
            "blueprint_fits": (slot, blueprint) not in space.unfit,
        },
    )


def g1_germinated(table: SlotTable, env: int, slot: int, _rules: LifecycleRules) -> GateVerdict:
    """Gate before TRAINING: the slot has a new seed."""
    return _verdict("G1", {"stage_germinated": bool(table.stage[env, slot] == Stage.GERMINATED)})


def g2_trained(table: SlotTable, env: int, slot: int, rules: LifecycleRules) -> GateVerdict:
    """Gate before BLENDING: enough incubation epochs, and measured gradients that neither vanish nor explode.

    Without incubation no gradients are measured, and only the number of epochs is checked.
    """
    checks = {"epochs": bool(table.epochs_in_stage[env, slot] >= rules.min_training_epochs)}
    if rules.min_training_epochs > 0:
        health = table.gradient_health[env, slot]
        checks["health_measured"] = not np.isnan(health)
        checks["health"] = bool(health >= MIN_GRADIENT_HEALTH)
        checks["not_exploding"] = bool(table.exploding[env, slot] == 0.0)
    return _verdict("G2", checks)


def g3_blended(table: SlotTable, env: int, slot: int, _rules: LifecycleRules) -> GateVerdict:
    """Gate before HOLDING: the target of alpha is 1.0, and the ramp has ended."""
    return _verdict(
        "G3",
        {
            "target_full": bool(table.alpha_target[env, slot] == 1.0),
            "target_reached": not bool(table.ramping[env, slot]),
        },
    )


def g5_worthy(table: SlotTable, env: int, slot: int, rules: LifecycleRules, *, finite: bool) -> GateVerdict:
    """Gate before FOSSILIZED: finite weights and a measured contribution.

    With ``strict_fossilize`` the lower confidence bound of the contribution must reach ``min_contribution``.
    """
    contribution = table.contribution[env, slot]
    checks = {"weights_finite": finite, "contribution_measured": not np.isnan(contribution)}
    if rules.strict_fossilize:
        lower = contribution - CONFIDENCE_Z * table.contribution_error[env, slot]
        checks["contribution_lower_bound"] = bool(lower >= rules.min_contribution)
    return _verdict("G5", checks)
