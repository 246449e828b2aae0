"""Execution of actions: check legality and gate of an action, then change slot table and network together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from esper.kasmina import lifecycle
from esper.leyline import GateVerdict, SlotTable, Stage, StageMove, legal_slots_by_op
from esper.leyline.factored_actions import (
    ALPHA_SPEED_EPOCHS,
    ALPHA_TARGET_VALUES,
    TEMPO_EPOCHS,
    AlphaCurve,
    BoolArray,
    Head,
    IntArray,
    LifecycleOp,
)
from esper.leyline.rules import ActionSpace, LifecycleRules


class Body(Protocol):
    """Interface of a network whose seeds are changed by actions: a real network or a simulation."""

    table: SlotTable
    """Slot table of the network's environment, with one row."""
    rules: LifecycleRules

    @property
    def action_space(self) -> ActionSpace: ...

    def germinate(self, slot: int, blueprint: int, style: int) -> int:
        """Attach a seed to ``slot`` and return its number of parameters."""

    def remove(self, slot: int) -> None:
        """Remove the seed of ``slot``."""

    def is_finite(self, slot: int) -> bool:
        """Return whether every weight of the seed in ``slot`` is finite."""

    def sync(self) -> None:
        """Copy alphas from the slot table to all seeds, and whether a seed takes part in the forward pass."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an action: the stage changes that it caused, or the gate that refused it and the checks that
    failed."""

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


def apply_action(body: Body, action: IntArray, seed_id: int, legal: BoolArray | None = None) -> Outcome:
    """Execute one action, then update the network from the slot table.

    Args:
        body: Network to change, with its slot table.
        action: Canonical action, one index per head, ``[head]``.
        seed_id: Serial number for the seed if the action germinates one.
        legal: Mask ``[op, slot]`` of legal actions; computed from the slot table unless given.
    """
    op, slot = LifecycleOp(int(action[Head.OP])), int(action[Head.SLOT])
    legal = legal_slots_by_op(body.table, body.rules)[0] if legal is None else legal
    if not legal[op, slot]:
        return Outcome(False, (), "legality", (op.name.lower(),))
    outcome = _attempt(body, action, op, slot, seed_id)
    settle(body, outcome.moves)
    return outcome


def _attempt(body: Body, action: IntArray, op: LifecycleOp, slot: int, seed_id: int) -> Outcome:
    table, rules = body.table, body.rules
    target = ALPHA_TARGET_VALUES[action[Head.ALPHA_TARGET]]
    epochs = ALPHA_SPEED_EPOCHS[action[Head.ALPHA_SPEED]]
    curve = AlphaCurve(int(action[Head.ALPHA_CURVE]))
    if op is LifecycleOp.WAIT:
        return Outcome.done([])
    if op is LifecycleOp.GERMINATE:
        return _germinate(body, action, slot, seed_id, target)
    if op is LifecycleOp.SET_ALPHA_TARGET:
        return Outcome.done(
            lifecycle.set_alpha_target(table, 0, slot, target=target, epochs=epochs, curve=curve)
        )
    if op is LifecycleOp.PRUNE:
        return Outcome.done(lifecycle.prune(table, 0, slot, rules, epochs=epochs, curve=curve))
    if op is LifecycleOp.FOSSILIZE:
        verdict = lifecycle.g5_worthy(table, 0, slot, rules, finite=body.is_finite(slot))
        if not verdict.ok:
            return Outcome.refused(verdict)
        return Outcome.done(lifecycle.fossilize(table, 0, slot, verdict))
    moves, verdict = lifecycle.enter_next_stage(table, 0, slot, rules, "policy")
    return Outcome.done(moves) if verdict.ok else Outcome.refused(verdict)


def _germinate(body: Body, action: IntArray, slot: int, seed_id: int, target: float) -> Outcome:
    blueprint, style = int(action[Head.BLUEPRINT]), int(action[Head.STYLE])
    verdict = lifecycle.g0_valid(body.action_space, slot, blueprint)
    if not verdict.ok:
        return Outcome.refused(verdict)
    params = body.germinate(slot, blueprint, style)
    seed = lifecycle.Germination(
        seed_id=seed_id,
        blueprint=blueprint,
        style=style,
        target=target,
        ramp_epochs=0 if body.rules.enters_at_once else TEMPO_EPOCHS[action[Head.TEMPO]],
        seed_params=params,
    )
    return Outcome.done(lifecycle.germinate(body.table, 0, slot, seed, body.rules))


def settle(body: Body, moves: Sequence[StageMove]) -> None:
    """Apply stage changes to the network: remove pruned seeds, and set every alpha to its value in the slot
    table."""
    for move in moves:
        if move.target is Stage.PRUNED:
            body.remove(move.slot)
    body.sync()


def commit(body: Body) -> list[StageMove]:
    """End an episode: make the seeds in HOLDING that pass gate G5 permanent, and remove all other live
    seeds."""
    table, rules = body.table, body.rules
    moves: list[StageMove] = []
    for slot in range(table.num_slots):
        if not table.live[0, slot]:
            continue
        reason = "not held at the horizon"
        if table.stage[0, slot] == Stage.HOLDING:
            verdict = lifecycle.g5_worthy(table, 0, slot, rules, finite=body.is_finite(slot))
            if verdict.ok:
                moves += lifecycle.fossilize(table, 0, slot, verdict, "mechanical", "horizon commits")
                continue
            reason = f"refused by {verdict.gate} at the horizon: {', '.join(verdict.failed)}"
        moves += lifecycle.prune(table, 0, slot, rules, cause="mechanical", reason=reason)
    settle(body, moves)
    return moves


def advance(body: Body) -> list[StageMove]:
    """Make the automatic stage changes at the end of an epoch, after ``tick`` and the measurements of the
    epoch.
    """
    moves = lifecycle.advance(body.table, 0, body.rules)
    settle(body, moves)
    return moves


def tick(body: Body) -> None:
    """Add one epoch to all epoch counters of the slots, such as age and epochs in stage."""
    lifecycle.tick(body.table, 0)
