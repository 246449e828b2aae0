"""Lifecycle of seeds: functions that change the stage of a slot in the slot table and return the stage
changes.

A lifecycle function depends only on the slot table and its arguments, not on modules, random numbers or the
clock. At the end of an epoch ``tick`` is called first, then the measurements are recorded, then ``advance``
makes the automatic stage changes.

A gate function (``g0_valid`` to ``g5_worthy``) checks the conditions of a stage change. An alpha ramp of n
epochs changes alpha once per epoch; in epoch k alpha has moved by the fraction curve(k/n) of the distance to
its target. Speed INSTANT is a ramp of 0 epochs. ``aim`` sets the target and length of a ramp, ``begin_ramp``
starts the ramp, ``tick_ramp`` advances it by one epoch.
"""

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from esper.leyline import NEVER, ActionSpace, EsperError, LifecycleRules, SlotTable
from esper.leyline.factored_actions import SIGMOID_STEEPNESS, STYLE_CURVES, AlphaCurve
from esper.leyline.rows import Cause, GateVerdict, StageMove
from esper.leyline.stages import LEGAL_MOVES, Stage
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
    """Gate before TRAINING: the slot has a seed in stage GERMINATED."""
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
    """Gate before HOLDING: the target of alpha is 1.0, and alpha has reached it."""
    return _verdict(
        "G3",
        {
            "target_full": bool(table.alpha_target[env, slot] == 1.0),
            "target_reached": not bool(table.ramping[env, slot]),
        },
    )


def g5_worthy(table: SlotTable, env: int, slot: int, rules: LifecycleRules, *, finite: bool) -> GateVerdict:
    """Gate before FOSSILIZED: finite weights and a measured contribution.

    If ``strict_fossilize`` is set, the lower confidence bound of the contribution must be at least
    ``min_contribution``.
    """
    contribution = table.contribution[env, slot]
    checks = {"weights_finite": finite, "contribution_measured": not np.isnan(contribution)}
    if rules.strict_fossilize:
        lower = contribution - CONFIDENCE_Z * table.contribution_error[env, slot]
        checks["contribution_lower_bound"] = bool(lower >= rules.min_contribution)
    return _verdict("G5", checks)


def curve_value(curve: AlphaCurve, progress: float) -> float:
    """Return the value of an alpha curve at ``progress`` from 0 to 1; every curve rises monotonically from 0
    to 1.

    Sigmoid curves are rescaled to be exactly 0 at the start and 1 at the end.
    """
    if progress <= 0.0:
        return 0.0
    if progress >= 1.0:
        return 1.0
    if curve is AlphaCurve.LINEAR:
        return progress
    if curve is AlphaCurve.COSINE:
        return 0.5 - 0.5 * math.cos(math.pi * progress)
    steepness = SIGMOID_STEEPNESS[curve]

    def sigmoid(x: float) -> float:
        return 1.0 / (1.0 + math.exp(-steepness * (x - 0.5)))

    low, high = sigmoid(0.0), sigmoid(1.0)
    return (sigmoid(progress) - low) / (high - low)


def ramp_value(start: float, target: float, curve: AlphaCurve, elapsed: int, epochs: int) -> float:
    """Return alpha in a ramp of ``epochs`` epochs, after ``elapsed`` of them; from the last epoch on, alpha
    is exactly ``target``.
    """
    if elapsed >= epochs:
        return target
    return start + (target - start) * curve_value(curve, elapsed / epochs)


def aim(table: SlotTable, env: int, slot: int, target: float, epochs: int, curve: AlphaCurve) -> None:
    """Set target, length and curve of the slot's next alpha ramp."""
    table.alpha_target[env, slot] = target
    table.ramp_epochs[env, slot] = epochs
    table.ramp_curve[env, slot] = curve


def begin_ramp(table: SlotTable, env: int, slot: int) -> None:
    """Start the alpha ramp that ``aim`` has set; the next epoch is the first epoch of the ramp.

    A ramp whose target is the present alpha gets 0 epochs: in stage HOLDING ramps are not advanced, and a
    longer ramp would never end.
    """
    if table.alpha_target[env, slot] == table.alpha[env, slot]:
        table.ramp_epochs[env, slot] = 0
    table.alpha_from[env, slot] = table.alpha[env, slot]
    table.ramp_elapsed[env, slot] = min(1, table.ramp_epochs[env, slot])
    _settle(table, env, slot)


def tick_ramp(table: SlotTable, env: int, slot: int) -> None:
    """Advance the alpha ramp of a slot by one epoch."""
    table.ramp_elapsed[env, slot] += 1
    _settle(table, env, slot)


def _settle(table: SlotTable, env: int, slot: int) -> None:
    table.alpha[env, slot] = ramp_value(
        float(table.alpha_from[env, slot]),
        float(table.alpha_target[env, slot]),
        AlphaCurve(int(table.ramp_curve[env, slot])),
        int(table.ramp_elapsed[env, slot]),
        int(table.ramp_epochs[env, slot]),
    )


class IllegalMoveError(EsperError):
    """Error: a stage change is not legal."""


def _origin_of_move(table: SlotTable, env: int, slot: int, target: Stage) -> Stage:
    """Return the slot's stage; raise IllegalMoveError if there is no legal move from that stage to
    ``target``."""
    origin = Stage(int(table.stage[env, slot]))
    if target not in LEGAL_MOVES[origin]:
        raise IllegalMoveError(
            f"slot {slot} of environment {env} cannot go from {origin.name} to {target.name}"
        )
    return origin


def _move(
    table: SlotTable,
    env: int,
    slot: int,
    target: Stage,
    cause: Cause,
    reason: str,
    verdict: GateVerdict | None = None,
) -> StageMove:
    origin = _origin_of_move(table, env, slot, target)
    table.stage[env, slot] = target
    table.epochs_in_stage[env, slot] = 0
    return StageMove(
        env=env,
        slot=slot,
        seed_id=int(table.seed_id[env, slot]),
        blueprint=int(table.blueprint[env, slot]),
        origin=origin,
        target=target,
        cause=cause,
        reason=reason,
        verdict=verdict,
        age=int(table.age[env, slot]),
        contribution=float(table.contribution[env, slot]),
    )


class Germination(NamedTuple):
    """Values of a new seed in the columns of the slot table."""

    seed_id: int
    blueprint: int
    style: int
    target: float
    """Alpha of the new seed at the end of its first ramp."""
    ramp_epochs: int
    seed_params: int


def germinate(
    table: SlotTable, env: int, slot: int, seed: Germination, rules: LifecycleRules
) -> list[StageMove]:
    """Add a new seed to the slot table, in an empty slot; with the rule ``auto_forward`` incubation starts in
    the same call.

    If incubation has 0 epochs, the new seed starts blending in the same call.
    """
    moved = _move(table, env, slot, Stage.GERMINATED, "policy", "germinated")
    table.seed_id[env, slot] = seed.seed_id
    table.blueprint[env, slot] = seed.blueprint
    table.style[env, slot] = seed.style
    table.seed_params[env, slot] = seed.seed_params
    aim(table, env, slot, seed.target, seed.ramp_epochs, STYLE_CURVES[seed.style])
    moves = [moved._replace(seed_id=seed.seed_id, blueprint=seed.blueprint)]
    if rules.auto_forward:
        moves += enter_next_stage(table, env, slot, rules)[0]
        if rules.min_training_epochs == 0:
            moves += enter_next_stage(table, env, slot, rules)[0]
    return moves


_NEXT: Final = {
    Stage.GERMINATED: (g1_germinated, Stage.TRAINING, "incubation begins"),
    Stage.TRAINING: (g2_trained, Stage.BLENDING, "incubation is over"),
    Stage.BLENDING: (g3_blended, Stage.HOLDING, "full alpha reached"),
}
"""For each stage: the gate that must pass, the next stage, and the reason that is recorded with the stage
change."""


def enter_next_stage(
    table: SlotTable, env: int, slot: int, rules: LifecycleRules, cause: Cause = "mechanical"
) -> tuple[list[StageMove], GateVerdict]:
    """Move a slot to its next stage if the gate before that stage passes.

    Returns:
        List of stage changes, empty if the gate refused, and the result of the gate.
    """
    gate, target, reason = _NEXT[Stage(int(table.stage[env, slot]))]
    verdict = gate(table, env, slot, rules)
    if not verdict.ok:
        return [], verdict
    moved = _move(table, env, slot, target, cause, reason, verdict)
    if target is Stage.BLENDING:
        begin_ramp(table, env, slot)
    return [moved], verdict


def set_alpha_target(
    table: SlotTable, env: int, slot: int, *, target: float, epochs: int, curve: AlphaCurve
) -> list[StageMove]:
    """Start an alpha ramp to ``target``; a seed in HOLDING whose alpha changes returns to BLENDING."""
    stage = Stage(int(table.stage[env, slot]))
    if stage not in (Stage.BLENDING, Stage.HOLDING):
        raise IllegalMoveError(f"slot {slot} of environment {env} has no alpha to send: it is {stage.name}")
    moves = []
    if stage is Stage.HOLDING and target != table.alpha[env, slot]:
        moves.append(_move(table, env, slot, Stage.BLENDING, "policy", f"alpha target {target:g}"))
    aim(table, env, slot, target, epochs, curve)
    begin_ramp(table, env, slot)
    return moves


def prune(
    table: SlotTable,
    env: int,
    slot: int,
    rules: LifecycleRules,
    *,
    epochs: int = 0,
    curve: AlphaCurve = AlphaCurve.LINEAR,
    cause: Cause = "policy",
    reason: str = "pruned",
) -> list[StageMove]:
    """Remove a live seed at once, or start a ramp of ``epochs`` to alpha 0, after which the seed is removed.

    A seed with alpha 0 is always removed at once.
    """
    _origin_of_move(table, env, slot, Stage.PRUNED)
    if epochs == 0 or table.alpha[env, slot] == 0.0:
        return _remove(table, env, slot, rules, cause, reason)
    moves = []
    if table.stage[env, slot] == Stage.HOLDING:
        moves.append(_move(table, env, slot, Stage.BLENDING, cause, f"ramp down: {reason}"))
    table.leaving[env, slot] = True
    aim(table, env, slot, 0.0, epochs, curve)
    begin_ramp(table, env, slot)
    return moves


def _remove(
    table: SlotTable, env: int, slot: int, rules: LifecycleRules, cause: Cause, reason: str
) -> list[StageMove]:
    pruned = _move(table, env, slot, Stage.PRUNED, cause, reason)
    table.clear(env, slot)
    table.stage[env, slot] = Stage.PRUNED
    moves = [pruned, _move(table, env, slot, Stage.EMBARGOED, "mechanical", "cooling down")]
    if rules.embargo_epochs == 0:
        moves.append(_move(table, env, slot, Stage.RESETTING, "mechanical", "no embargo"))
    return moves


def fossilize(
    table: SlotTable,
    env: int,
    slot: int,
    verdict: GateVerdict,
    cause: Cause = "policy",
    reason: str = "fossilized",
) -> list[StageMove]:
    """Make a seed in HOLDING permanent; ``verdict`` is the verdict of gate G5, which must have passed."""
    if not verdict.ok:
        raise IllegalMoveError(
            f"slot {slot} of environment {env} was refused by {verdict.gate}: {verdict.failed}"
        )
    return [_move(table, env, slot, Stage.FOSSILIZED, cause, reason, verdict)]


def tick(table: SlotTable, env: int) -> None:
    """Add one epoch to all epoch counters of an environment's slots."""
    table.epochs_in_stage[env] += 1
    table.age[env] += table.occupied[env]
    table.epochs_since_measured[env] += table.epochs_since_measured[env] != NEVER


def advance(table: SlotTable, env: int, rules: LifecycleRules) -> list[StageMove]:
    """Advance alpha ramps and make the automatic stage changes, upstream slots first."""
    return [move for slot in range(table.num_slots) for move in _advance_slot(table, env, slot, rules)]


def _advance_slot(table: SlotTable, env: int, slot: int, rules: LifecycleRules) -> list[StageMove]:
    stage = Stage(int(table.stage[env, slot]))
    if stage is Stage.EMBARGOED and table.epochs_in_stage[env, slot] >= rules.embargo_epochs:
        return [_move(table, env, slot, Stage.RESETTING, "mechanical", "embargo is over")]
    if stage is Stage.RESETTING:
        return [_move(table, env, slot, Stage.DORMANT, "mechanical", "slot is empty again")]
    if stage is Stage.TRAINING and rules.auto_forward:
        return enter_next_stage(table, env, slot, rules)[0]
    if stage is not Stage.BLENDING:
        return []
    if table.ramping[env, slot]:
        tick_ramp(table, env, slot)
        return []
    if table.leaving[env, slot]:
        return _remove(table, env, slot, rules, "mechanical", "ramped down")
    return enter_next_stage(table, env, slot, rules)[0] if rules.auto_forward else []
