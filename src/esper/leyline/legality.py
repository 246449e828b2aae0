"""Legal (op, slot) pairs, for action masks, actuator and controllers.

Only impossible (op, slot) pairs are illegal; timing and quality are left to the controller. A legal action is
attempted, and only a named gate can still refuse it.
"""

import numpy as np

from esper.leyline.factored_actions import CANONICAL_ACTION, NUM_OPS, BoolArray, Head, LifecycleOp
from esper.leyline.rules import LifecycleRules
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import Stage


def legal_slots_by_op(table: SlotTable, rules: LifecycleRules) -> BoolArray:
    """Return a bool array ``[env, op, slot]``, true where the op is possible on the slot.

    WAIT reads no slot, so it is legal for the canonical slot alone, in every environment.
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
