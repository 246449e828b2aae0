"""From an action to a changed model: legality first, then the gate, then table and module together."""

from __future__ import annotations

from dataclasses import dataclass

from esper.kasmina import gates, lifecycle
from esper.kasmina.model import MorphogeneticModel
from esper.leyline.events import GateVerdict, StageMove
from esper.leyline.factored_actions import (
    ALPHA_SPEED_EPOCHS,
    ALPHA_TARGET_VALUES,
    TEMPO_EPOCHS,
    AlphaCurve,
    Head,
    IntArray,
    Op,
)
from esper.leyline.legality import legal_slots_by_op
from esper.leyline.stages import Stage


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether an action came about, and who refused it if not."""

    succeeded: bool
    moves: tuple[StageMove, ...] = ()
    refused_by: str | None = None
    failed_checks: tuple[str, ...] = ()

    @classmethod
    def done(cls, moves: list[StageMove]) -> Outcome:
        return cls(True, tuple(moves))

    @classmethod
    def refused(cls, verdict: GateVerdict) -> Outcome:
        return cls(False, (), verdict.gate, verdict.failed)


def apply_action(model: MorphogeneticModel, action: IntArray, seed_id: int) -> Outcome:
    """Carry out one canonical action ``[8]``; ``seed_id`` is the number of the next seed.

    Table and model agree again when this returns.
    """
    op, slot = Op(int(action[Head.OP])), int(action[Head.SLOT])
    if not legal_slots_by_op(model.table, model.rules)[0, op, slot]:
        return Outcome(False, (), "legality", (op.name.lower(),))
    outcome = _attempt(model, action, op, slot, seed_id)
    settle(model, outcome.moves)
    return outcome


def _attempt(model: MorphogeneticModel, action: IntArray, op: Op, slot: int, seed_id: int) -> Outcome:
    table, rules = model.table, model.rules
    target = ALPHA_TARGET_VALUES[action[Head.ALPHA_TARGET]]
    epochs = ALPHA_SPEED_EPOCHS[action[Head.ALPHA_SPEED]]
    curve = AlphaCurve(int(action[Head.ALPHA_CURVE]))
    if op is Op.WAIT:
        return Outcome.done([])
    if op is Op.GERMINATE:
        return _germinate(model, action, slot, seed_id, target)
    if op is Op.SET_ALPHA_TARGET:
        return Outcome.done(
            lifecycle.set_alpha_target(table, 0, slot, target=target, epochs=epochs, curve=curve)
        )
    if op is Op.PRUNE:
        return Outcome.done(lifecycle.prune(table, 0, slot, rules, epochs=epochs, curve=curve))
    if op is Op.FOSSILIZE:
        verdict = gates.g5_worthy(table, 0, slot, rules, finite=model.slot(slot).is_finite)
        if not verdict.ok:
            return Outcome.refused(verdict)
        return Outcome.done(lifecycle.fossilize(table, 0, slot, verdict))
    moves, verdict = lifecycle.advance_by_request(table, 0, slot, rules)
    return Outcome.done(moves) if verdict.ok else Outcome.refused(verdict)


def _germinate(
    model: MorphogeneticModel, action: IntArray, slot: int, seed_id: int, target: float
) -> Outcome:
    blueprint, style = int(action[Head.BLUEPRINT]), int(action[Head.STYLE])
    verdict = gates.g0_valid(model.action_space, slot, blueprint)
    if not verdict.ok:
        return Outcome.refused(verdict)
    params = model.germinate(slot, blueprint, style)
    seed = lifecycle.Germination(
        seed_id=seed_id,
        blueprint=blueprint,
        style=style,
        target=target,
        ramp_epochs=TEMPO_EPOCHS[action[Head.TEMPO]],
        seed_params=params,
    )
    return Outcome.done(lifecycle.germinate(model.table, 0, slot, seed, model.rules))


def settle(model: MorphogeneticModel, moves: tuple[StageMove, ...] | list[StageMove]) -> None:
    """Bring the model in line with the table after ``moves``: pruned seeds leave, alphas follow."""
    for move in moves:
        if move.target is Stage.PRUNED:
            model.slot(move.slot).remove()
    model.sync()


def commit(model: MorphogeneticModel) -> list[StageMove]:
    """The horizon: held seeds that pass G5 become permanent, every other live seed is removed."""
    table, rules = model.table, model.rules
    moves: list[StageMove] = []
    for slot in range(table.num_slots):
        if not table.live[0, slot]:
            continue
        reason = "not held at the horizon"
        if table.stage[0, slot] == Stage.HOLDING:
            verdict = gates.g5_worthy(table, 0, slot, rules, finite=model.slot(slot).is_finite)
            if verdict.ok:
                moves += lifecycle.fossilize(table, 0, slot, verdict, "mechanical", "horizon commits")
                continue
            reason = f"refused by {verdict.gate} at the horizon: {', '.join(verdict.failed)}"
        moves += lifecycle.prune(table, 0, slot, rules, cause="mechanical", reason=reason)
    settle(model, moves)
    return moves
