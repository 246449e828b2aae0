from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline import LifecycleOp, LifecycleRules, SlotTable, Stage, legal_slots_by_op
from tests.leyline.building import put, random_table

RULES = LifecycleRules()
MANUAL = LifecycleRules(auto_forward=False)
SEEDED = {"age": 5, "alpha": 1.0, "alpha_target": 1.0, "contribution": 2.0}


def slots(table: SlotTable, op: int, rules: LifecycleRules = RULES) -> list[int]:
    return np.flatnonzero(legal_slots_by_op(table, rules)[0, op]).tolist()


def table_of_all_stages(**columns: Any) -> SlotTable:
    """Return a slot table of ten slots in which slot i is in stage i."""
    table = SlotTable.empty(1, 10)
    for stage in Stage:
        put(table, int(stage), stage, **columns)
    return table


@pytest.mark.parametrize(
    ("op", "rules", "expected"),
    [
        (LifecycleOp.WAIT, RULES, [0]),
        (LifecycleOp.GERMINATE, RULES, [Stage.DORMANT]),
        (LifecycleOp.SET_ALPHA_TARGET, RULES, [Stage.BLENDING, Stage.HOLDING]),
        (LifecycleOp.PRUNE, RULES, [Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING]),
        (LifecycleOp.FOSSILIZE, RULES, [Stage.HOLDING]),
        (LifecycleOp.ADVANCE, RULES, []),
        (LifecycleOp.ADVANCE, MANUAL, [Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING]),
    ],
)
def test_each_op_is_legal_only_on_slots_in_the_stages_specified_for_the_op(
    op: int, rules: LifecycleRules, expected: list[int]
) -> None:
    assert slots(table_of_all_stages(**SEEDED), op, rules) == expected


@pytest.mark.parametrize(("max_seeds", "expected"), [(0, [2, 3]), (1, []), (2, []), (3, [2, 3])])
def test_germinate_needs_an_enabled_dormant_slot_and_fewer_than_max_seeds(
    max_seeds: int, expected: list[int]
) -> None:
    table = SlotTable.empty(1, 6)
    put(table, 0, Stage.FOSSILIZED)
    put(table, 1, Stage.TRAINING)
    put(table, 4, Stage.EMBARGOED)  # A slot in EMBARGOED does not count towards max_seeds.
    table.enabled[0, 5] = False
    assert slots(table, LifecycleOp.GERMINATE, LifecycleRules(max_seeds=max_seeds)) == expected


def test_limit_max_seeds_applies_to_each_environment_separately() -> None:
    table = SlotTable.empty(2, 2)
    put(table, 0, Stage.FOSSILIZED, env=1)
    legal = legal_slots_by_op(table, LifecycleRules(max_seeds=1))
    assert legal[:, LifecycleOp.GERMINATE].tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize(("age", "expected"), [(0, []), (4, []), (5, [0])])
def test_prune_is_legal_for_seeds_of_at_least_min_prune_age(age: int, expected: list[int]) -> None:
    table = SlotTable.empty(1, 1)
    put(table, 0, Stage.TRAINING, age=age)
    assert slots(table, LifecycleOp.PRUNE) == expected
    assert slots(table, LifecycleOp.PRUNE, LifecycleRules(min_prune_age=age)) == [0]


def test_no_op_is_legal_on_a_seed_that_is_being_pruned() -> None:
    table = SlotTable.empty(1, 1)
    put(table, 0, Stage.BLENDING, leaving=True, **SEEDED)
    assert slots(table, LifecycleOp.PRUNE) == []
    assert slots(table, LifecycleOp.SET_ALPHA_TARGET) == []
    assert slots(table, LifecycleOp.ADVANCE, MANUAL) == []


@pytest.mark.parametrize("stage", [Stage.BLENDING, Stage.HOLDING])
def test_set_alpha_target_is_illegal_during_an_alpha_ramp(stage: Stage) -> None:
    table = SlotTable.empty(1, 1)
    put(table, 0, stage, ramp_epochs=3, ramp_elapsed=2, **SEEDED)
    assert slots(table, LifecycleOp.SET_ALPHA_TARGET) == []
    assert slots(table, LifecycleOp.PRUNE) == [0], "a prune can interrupt a ramp"
    table.ramp_elapsed[0, 0] = 3
    assert slots(table, LifecycleOp.SET_ALPHA_TARGET) == [0]


def test_fossilize_needs_a_measured_contribution() -> None:
    table = SlotTable.empty(1, 2)
    put(table, 0, Stage.HOLDING)
    put(table, 1, Stage.HOLDING, contribution=-3.0)
    assert slots(table, LifecycleOp.FOSSILIZE) == [1], "a negative contribution is legal"


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 3, 4, 5, 8]), st.booleans(), st.integers(0, 3))
def test_wait_is_always_legal_and_ops_that_act_on_seeds_are_illegal_on_empty_slots(
    rng_seed: int, num_slots: int, auto_forward: bool, max_seeds: int
) -> None:
    table = random_table(np.random.default_rng(rng_seed), 4, num_slots)
    rules = LifecycleRules(auto_forward=auto_forward, max_seeds=max_seeds)
    legal = legal_slots_by_op(table, rules)
    assert legal.shape == (4, 6, num_slots)
    assert legal.dtype == np.bool_
    assert legal[:, LifecycleOp.WAIT].sum(axis=1).tolist() == [1, 1, 1, 1]
    assert legal.any(axis=2).any(axis=1).all()
    empty = ~table.occupied
    acting = legal[
        :, [LifecycleOp.SET_ALPHA_TARGET, LifecycleOp.PRUNE, LifecycleOp.FOSSILIZE, LifecycleOp.ADVANCE]
    ]
    assert not (acting & empty[:, None]).any(), "ops on seeds need a seed"
