"""Optimal actions for every oracle, chosen by scripts that read the hidden state of the environment."""

from collections.abc import Callable
from typing import Any

import numpy as np

from esper.leyline import CANONICAL_ACTION, AlphaTarget, BlueprintAction, Head, LifecycleOp, Tempo
from esper.leyline.factored_actions import IntArray
from tests.simic.oracles.lifecycle_envs import Lifecycle, LifecycleOracle, Scaffold
from tests.simic.oracles.toy_envs import Bandit, Combination, Distractors, Memory, Rent, Timing, ToyOracle
from tests.simic.oracles.trial import OracleClass

Script = Callable[[Any, int], IntArray]
"""Script: function from oracle environments and step number to actions ``[env, head]``."""


def action(num_envs: int, op: int, slot: Any = 0, **heads: Any) -> IntArray:
    """Return actions with the same op in all environments; heads without an argument are canonical."""
    rows = np.tile(CANONICAL_ACTION, (num_envs, 1))
    rows[:, Head.OP], rows[:, Head.SLOT] = op, slot
    for name, value in heads.items():
        rows[:, Head[name.upper()]] = value
    return rows


def plant(num_envs: int, slot: Any, blueprint: Any = BlueprintAction.NORM) -> IntArray:
    """Return actions that germinate in all environments, with the shortest ramp to full alpha."""
    return action(
        num_envs,
        LifecycleOp.GERMINATE,
        slot,
        blueprint=blueprint,
        tempo=Tempo.FAST,
        alpha_target=AlphaTarget.FULL,
    )


def bandit(env: Bandit, step: int) -> IntArray:
    return plant(env.num_envs, 2, BlueprintAction.CONV_HEAVY)


def timing(env: Timing, step: int) -> IntArray:
    if step == 0:
        return plant(env.num_envs, 0)
    return action(env.num_envs, LifecycleOp.FOSSILIZE if step == 4 else LifecycleOp.WAIT)


def memory(env: Memory, step: int) -> IntArray:
    return plant(env.num_envs, env.answer) if step == 50 else action(env.num_envs, LifecycleOp.WAIT)


def combination(env: Combination, step: int) -> IntArray:
    slot = np.where(env.op == LifecycleOp.GERMINATE, env.slot, env.slot_of_op[env.op])
    rows = plant(env.num_envs, slot, env.blueprint_of_slot[slot])
    rows[:, Head.OP] = env.op
    return rows


def rent(env: Rent, step: int) -> IntArray:
    return plant(env.num_envs, step) if step < 2 else action(env.num_envs, LifecycleOp.WAIT)


def distractors(env: Distractors, step: int) -> IntArray:
    return plant(env.num_envs, env.shown)


def lifecycle(env: Lifecycle, step: int) -> IntArray:
    best = (BlueprintAction.CONV_HEAVY, BlueprintAction.CONV_LIGHT, BlueprintAction.DEPTHWISE)
    return plant(env.num_envs, step, best[step]) if step < 3 else action(env.num_envs, LifecycleOp.WAIT)


def scaffold(env: Scaffold, step: int) -> IntArray:
    """Plant the scaffold in slot 0 at step 0 and a seed in slot 2 at step 2; prune the scaffold at step 4."""
    steps = {
        0: plant(env.num_envs, 0),
        2: plant(env.num_envs, 2),
        4: action(env.num_envs, LifecycleOp.PRUNE, 0),
    }
    return steps.get(step, action(env.num_envs, LifecycleOp.WAIT))


SCRIPTS: dict[OracleClass, Script] = {
    Bandit: bandit,
    Timing: timing,
    Memory: memory,
    Combination: combination,
    Rent: rent,
    Distractors: distractors,
    Lifecycle: lifecycle,
    Scaffold: scaffold,
}


def follow(env: ToyOracle | LifecycleOracle, script: Script) -> np.ndarray:
    """Run one oracle episode with a script, assert that all actions are legal, return the episode returns."""
    masks, returns = env.reset().masks, np.zeros(env.num_envs)
    for number in range(env.horizon):
        actions = script(env, number)
        rows = np.arange(env.num_envs)
        assert masks.slot_by_op.numpy()[rows, actions[:, Head.OP], actions[:, Head.SLOT]].all()
        step = env.step(actions)
        returns += step.reward
        masks = step.observation.masks
        assert step.ended.all() == (number == env.horizon - 1)
    return returns
