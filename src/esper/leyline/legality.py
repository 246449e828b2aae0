"""Which (op, slot) pairs are possible: the one function that masks, executor, rewards and heuristic call.

Only the physically impossible is excluded, never a question of timing or taste. What is legal is
attempted; from there on only a gate may refuse it, by name.
"""

import numpy as np

from esper.leyline.factored_actions import CANONICAL_ACTION, NUM_OPS, BoolArray, Head, LifecycleOp
from esper.leyline.lifecycle_rules import LifecycleRules
from esper.leyline.slot_table import SlotTable
from esper.leyline.stages import Stage


def legal_slots_by_op(table: SlotTable, rules: LifecycleRules) -> BoolArray:
    """``[env, op, slot]``: true where the op is possible on that slot.

    WAIT reads no slot, so its row holds the canonical slot alone and is always possible.
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
