"""Functions that build action spaces, facts and slot tables for tests."""

from typing import Any

import numpy as np

from esper.leyline import (
    BLUEPRINT_NAMES,
    CNN_BLUEPRINTS,
    OP_GERMINATE,
    OP_WAIT,
    TRANSFORMER_BLUEPRINTS,
    ActionSpace,
    EnvFacts,
    EpochFacts,
    Head,
    LifecycleRules,
    SlotConfig,
    SlotTable,
    Stage,
    canonicalise,
    check_actions,
    legal_slots_by_op,
)
from esper.leyline.slot_table import IntArray

CNN = tuple(sorted(int(b) for b in CNN_BLUEPRINTS))
TRANSFORMER = tuple(sorted(int(b) for b in TRANSFORMER_BLUEPRINTS))


def space_of(num_slots: int = 3, blueprints: tuple[int, ...] = CNN, **rules: Any) -> ActionSpace:
    """Return an action space with short lifecycle delays; ``rules`` override lifecycle settings."""
    small = {"min_training_epochs": 2, "min_prune_age": 3, "embargo_epochs": 2}
    return ActionSpace(
        SlotConfig.of_count(num_slots), LifecycleRules(**{**small, **rules}), blueprints, BLUEPRINT_NAMES
    )


def env_facts(epoch: int = 0, loss: float = 2.0, score: float = 50.0, max_epochs: int = 20) -> EnvFacts:
    """Return the facts of one environment after an epoch; fields without an argument are constant."""
    return EnvFacts(
        epoch=epoch,
        max_epochs=max_epochs,
        train_loss=float("nan") if epoch == 0 else loss,
        train_score=float("nan") if epoch == 0 else score,
        val_loss=loss,
        val_score=score,
        params=1000 + epoch,
        grown_params=0,
        param_budget=5000,
        host_gradient_norm=1.0,
        last_op=OP_WAIT,
        last_success=True,
        ended=epoch == max_epochs,
        rolled_back=False,
        minibatches=16 * epoch,
    )


def facts_of(
    epoch: int = 0, loss: float = 2.0, score: float = 50.0, max_epochs: int = 20, num_envs: int = 1
) -> EpochFacts:
    """Return the facts of ``num_envs`` environments, with equal values in all of them."""
    return EpochFacts.stack([env_facts(epoch, loss, score, max_epochs)] * num_envs)


def put(table: SlotTable, slot: int, stage: Stage, env: int = 0, **columns: Any) -> None:
    """Set the stage and the given columns of one slot in a slot table."""
    table.stage[env, slot] = stage
    for name, value in columns.items():
        getattr(table, name)[env, slot] = value


def random_table(rng: np.random.Generator, num_envs: int, num_slots: int) -> SlotTable:
    """Return a slot table with random stages, ages, ramps and measurements; disabled slots are empty."""
    shape = (num_envs, num_slots)
    table = SlotTable.empty(num_envs, num_slots)
    table.enabled[...] = rng.random(shape) < 0.8
    table.stage[...] = np.where(table.enabled, rng.integers(1, 10, shape), Stage.DORMANT)
    seeded = table.occupied
    table.seed_id[...] = np.where(seeded, rng.integers(0, 9, shape), -1)
    table.blueprint[...] = np.where(seeded, rng.integers(1, 13, shape), -1)
    table.age[...] = seeded * rng.integers(0, 12, shape)
    table.epochs_in_stage[...] = rng.integers(0, 12, shape)
    table.alpha[...] = table.in_forward * rng.choice([0.0, 0.2, 0.5, 1.0], shape)
    table.ramp_epochs[...] = seeded * rng.choice([0, 3, 5, 8], shape)
    table.ramp_elapsed[...] = np.minimum(table.ramp_epochs, rng.integers(0, 9, shape))
    table.leaving[...] = (table.stage == Stage.BLENDING) & (rng.random(shape) < 0.3)
    known = table.in_forward & (rng.random(shape) < 0.7)
    table.contribution[...] = np.where(known, rng.normal(0.0, 5.0, shape), np.nan)
    table.contribution_error[...] = np.where(known, rng.random(shape) * 3.0, np.nan)
    return table


def assert_legal(actions: IntArray, table: SlotTable, space: ActionSpace) -> None:
    """Assert that the op of every action is legal on its slot, and that the blueprint is selectable."""
    check_actions(actions, table.num_envs, table.num_slots)
    legal = legal_slots_by_op(table, space.rules)
    envs = np.arange(table.num_envs)
    assert legal[envs, actions[:, Head.OP], actions[:, Head.SLOT]].all()
    planted = actions[actions[:, Head.OP] == OP_GERMINATE, Head.BLUEPRINT]
    assert set(planted.tolist()) <= set(space.blueprints)


def assert_canonical(actions: IntArray, table: SlotTable) -> None:
    """Assert that heads that the op does not read have their canonical value."""
    alpha = table.alpha[np.arange(table.num_envs), actions[:, Head.SLOT]]
    np.testing.assert_array_equal(actions, canonicalise(actions, alpha))
