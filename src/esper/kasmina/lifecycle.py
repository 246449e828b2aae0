"""Lifecycle of seeds: functions that change the stage of a slot in the slot table and return the moves.

The result of a lifecycle function depends only on the slot table and the arguments: no modules, no random
numbers, no clock. At the end of an epoch ``tick`` is called first, then the measurements are recorded, then
``advance`` makes the stage moves that need no decision.
"""

from typing import Final, NamedTuple

from esper.kasmina import alpha, gates
from esper.leyline import NEVER, EsperError, LifecycleRules, SlotTable, Stage, is_legal_move
from esper.leyline.factored_actions import STYLE_CURVES, AlphaCurve
from esper.leyline.rows import Cause, GateVerdict, StageMove


class IllegalMoveError(EsperError):
    """Error: a stage move is not in the transition table."""


def _origin_of_move(table: SlotTable, env: int, slot: int, target: Stage) -> Stage:
    """Return the slot's stage; raise IllegalMoveError if no move leads from that stage to ``target``."""
    origin = Stage(int(table.stage[env, slot]))
    if not is_legal_move(origin, target):
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
    """Columns of the slot table for a new seed."""

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
    """Enter a new seed into an empty slot; with ``auto_forward`` it also starts incubation.

    Without incubation epochs, the new seed starts blending in the same call.
    """
    moved = _move(table, env, slot, Stage.GERMINATED, "policy", "germinated")
    table.seed_id[env, slot] = seed.seed_id
    table.blueprint[env, slot] = seed.blueprint
    table.style[env, slot] = seed.style
    table.seed_params[env, slot] = seed.seed_params
    alpha.aim(table, env, slot, seed.target, seed.ramp_epochs, STYLE_CURVES[seed.style])
    moves = [moved._replace(seed_id=seed.seed_id, blueprint=seed.blueprint)]
    if rules.auto_forward:
        moves += enter_next_stage(table, env, slot, rules)[0]
        if rules.min_training_epochs == 0:
            moves += enter_next_stage(table, env, slot, rules)[0]
    return moves


_NEXT: Final = {
    Stage.GERMINATED: (gates.g1_germinated, Stage.TRAINING, "incubation begins"),
    Stage.TRAINING: (gates.g2_trained, Stage.BLENDING, "incubation is over"),
    Stage.BLENDING: (gates.g3_blended, Stage.HOLDING, "full alpha reached"),
}
"""For each stage: the gate to the next stage, the next stage, and the recorded reason of the move."""


def enter_next_stage(
    table: SlotTable, env: int, slot: int, rules: LifecycleRules, cause: Cause = "mechanical"
) -> tuple[list[StageMove], GateVerdict]:
    """Move the slot to its next stage if the gate between them passes.

    Returns:
        Stage moves (empty if the gate failed) and the verdict of the gate.
    """
    gate, target, reason = _NEXT[Stage(int(table.stage[env, slot]))]
    verdict = gate(table, env, slot, rules)
    if not verdict.ok:
        return [], verdict
    moved = _move(table, env, slot, target, cause, reason, verdict)
    if target is Stage.BLENDING:
        alpha.begin_ramp(table, env, slot)
    return [moved], verdict


def set_alpha_target(
    table: SlotTable, env: int, slot: int, *, target: float, epochs: int, curve: AlphaCurve
) -> list[StageMove]:
    """Start an alpha ramp to ``target``; a seed that leaves full alpha returns from HOLDING to BLENDING."""
    stage = Stage(int(table.stage[env, slot]))
    if stage not in (Stage.BLENDING, Stage.HOLDING):
        raise IllegalMoveError(f"slot {slot} of environment {env} has no alpha to send: it is {stage.name}")
    moves = []
    if stage is Stage.HOLDING and target != table.alpha[env, slot]:
        moves.append(_move(table, env, slot, Stage.BLENDING, "policy", f"alpha target {target:g}"))
    alpha.aim(table, env, slot, target, epochs, curve)
    alpha.begin_ramp(table, env, slot)
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
    alpha.aim(table, env, slot, 0.0, epochs, curve)
    alpha.begin_ramp(table, env, slot)
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
    """Make a held seed permanent; ``verdict`` is the passed verdict of gate G5."""
    if not verdict.ok:
        raise IllegalMoveError(
            f"slot {slot} of environment {env} was refused by {verdict.gate}: {verdict.failed}"
        )
    return [_move(table, env, slot, Stage.FOSSILIZED, cause, reason, verdict)]


def tick(table: SlotTable, env: int) -> None:
    """Add one epoch to all counters of the environment's slots."""
    table.epochs_in_stage[env] += 1
    table.age[env] += table.occupied[env]
    table.epochs_since_measured[env] += table.epochs_since_measured[env] != NEVER


def advance(table: SlotTable, env: int, rules: LifecycleRules) -> list[StageMove]:
    """Advance alpha ramps and make the moves that need no decision, upstream slots first."""
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
        alpha.tick_ramp(table, env, slot)
        return []
    if table.leaving[env, slot]:
        return _remove(table, env, slot, rules, "mechanical", "ramped down")
    return enter_next_stage(table, env, slot, rules)[0] if rules.auto_forward else []
