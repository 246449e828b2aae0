"""The gates between stages: each returns the names of the checks that passed and failed."""

from collections.abc import Mapping

import numpy as np

from esper.leyline.rows import GateVerdict
from esper.leyline.rules import ActionSpace, LifecycleRules
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import Stage
from esper.leyline.thresholds import CONFIDENCE_Z, MIN_GRADIENT_HEALTH


def _verdict(gate: str, checks: Mapping[str, bool]) -> GateVerdict:
    passed = tuple(name for name, ok in checks.items() if ok)
    failed = tuple(name for name, ok in checks.items() if not ok)
    return GateVerdict(gate, passed, failed)


def g0_valid(space: ActionSpace, slot: int, blueprint: int) -> GateVerdict:
    """Before germination: slot and blueprint exist on this host, and the one fits into the other."""
    return _verdict(
        "G0",
        {
            "slot_known": 0 <= slot < space.slot_config.num_slots,
            "blueprint_selectable": blueprint in space.blueprints,
            "blueprint_fits": (slot, blueprint) not in space.unfit,
        },
    )


def g1_germinated(table: SlotTable, env: int, slot: int, _rules: LifecycleRules) -> GateVerdict:
    """Before TRAINING: a seed is attached and waits."""
    return _verdict("G1", {"stage_germinated": bool(table.stage[env, slot] == Stage.GERMINATED)})


def g2_trained(table: SlotTable, env: int, slot: int, rules: LifecycleRules) -> GateVerdict:
    """Before BLENDING: incubated long enough, with gradients that were measured and are healthy.

    Without incubation there is nothing to measure, so only the length counts.
    """
    checks = {"epochs": bool(table.epochs_in_stage[env, slot] >= rules.min_training_epochs)}
    if rules.min_training_epochs > 0:
        health = table.gradient_health[env, slot]
        checks["health_measured"] = not np.isnan(health)
        checks["health"] = bool(health >= MIN_GRADIENT_HEALTH)
        checks["not_exploding"] = bool(table.exploding[env, slot] == 0.0)
    return _verdict("G2", checks)


def g3_blended(table: SlotTable, env: int, slot: int, _rules: LifecycleRules) -> GateVerdict:
    """Before HOLDING: alpha was sent to 1.0 and is there."""
    return _verdict(
        "G3",
        {
            "target_full": bool(table.alpha_target[env, slot] == 1.0),
            "target_reached": not bool(table.ramping[env, slot]),
        },
    )


def g5_worthy(table: SlotTable, env: int, slot: int, rules: LifecycleRules, *, finite: bool) -> GateVerdict:
    """Before FOSSILIZED: finite weights and a measured contribution, or its lower bound if strict."""
    contribution = table.contribution[env, slot]
    checks = {"weights_finite": finite, "contribution_measured": not np.isnan(contribution)}
    if rules.strict_fossilize:
        lower = contribution - CONFIDENCE_Z * table.contribution_error[env, slot]
        checks["contribution_lower_bound"] = bool(lower >= rules.min_contribution)
    return _verdict("G5", checks)
