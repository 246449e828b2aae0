import numpy as np
import pytest

from esper.leyline import GradientStatistics, SlotTable, Stage
from tests.leyline.building import random_table


def test_slots_of_an_empty_slot_table_are_dormant_enabled_and_unmeasured() -> None:
    table = SlotTable.empty(2, 3)
    assert (table.num_envs, table.num_slots) == (2, 3)
    assert (table.stage == Stage.DORMANT).all()
    assert table.enabled.all()
    assert not table.measured.any()
    assert (table.seed_id == -1).all()
    assert (table.epochs_since_measured == -1).all()
    assert {array.shape for array in table.arrays().values()} == {(2, 3)}
    assert {str(array.dtype) for array in table.arrays().values()} == {"bool", "int64", "float64"}


def test_row_of_one_environment_shares_memory_with_the_slot_table() -> None:
    table = SlotTable.empty(3, 2)
    row = table.row(1)
    row.stage[0, 1] = Stage.HOLDING
    table.alpha[1, 0] = 0.25
    assert table.stage.tolist() == [[1, 1], [1, 5], [1, 1]]
    assert row.alpha.tolist() == [[0.25, 0.0]]
    assert all(np.shares_memory(row.arrays()[name], array) for name, array in table.arrays().items())


def test_copy_of_a_slot_table_shares_no_memory_and_assign_writes_in_place() -> None:
    table = random_table(np.random.default_rng(0), 2, 3)
    before, row = table.copy(), table.row(1)
    table.stage[...] = Stage.FOSSILIZED
    table.contribution[...] = 1.0
    table.assign(before)
    for name, array in table.arrays().items():
        np.testing.assert_array_equal(array, before.arrays()[name])
        assert not np.shares_memory(array, before.arrays()[name])
    assert np.shares_memory(row.stage, table.stage), "earlier views stay valid"


def test_clear_of_a_slot_table_resets_all_columns_of_one_slot_except_enabled() -> None:
    table = random_table(np.random.default_rng(1), 2, 3)
    before = table.copy()
    table.enabled[1, 2] = False
    table.clear(1, 2)
    blank = SlotTable.empty(1, 1)
    for name, array in table.arrays().items():
        others = np.ones((2, 3), dtype=bool)
        others[1, 2] = False
        np.testing.assert_array_equal(array[others], before.arrays()[name][others])
        if name != "enabled":
            np.testing.assert_array_equal(array[1, 2], blank.arrays()[name][0, 0])
    assert not table.enabled[1, 2]


def test_ramping_is_true_for_blended_seeds_with_an_unfinished_alpha_ramp() -> None:
    table = SlotTable.empty(1, 4)
    table.stage[0] = [Stage.BLENDING, Stage.BLENDING, Stage.HOLDING, Stage.TRAINING]
    table.ramp_epochs[0] = [3, 3, 0, 3]
    table.ramp_elapsed[0] = [2, 3, 0, 0]
    assert table.ramping.tolist() == [[True, False, False, False]], "a seed in TRAINING does not ramp yet"


def test_contribution_velocity_is_a_moving_average_of_contribution_changes() -> None:
    table = SlotTable.empty(1, 2)
    table.record_contribution(0, 1, 2.0, 0.5)
    assert np.isnan(table.contribution_velocity[0, 1]), "one measurement has no change"
    table.record_contribution(0, 1, 5.0, 0.4)
    assert table.contribution_velocity[0, 1] == 3.0  # First contribution velocity: the first change, 5 − 2.
    table.epochs_since_measured[0, 1] = 4
    table.record_contribution(0, 1, 4.0, 0.3)
    # The moving average is 0.7 · 3 (old velocity) + 0.3 · (4 − 5) (new change).
    assert table.contribution_velocity[0, 1] == pytest.approx(1.8)
    assert (table.contribution[0, 1], table.contribution_error[0, 1]) == (4.0, 0.3)
    assert table.epochs_since_measured.tolist() == [[-1, 0]]
    assert table.measured.tolist() == [[False, True]]


def test_record_gradients_moves_the_last_gradient_health_to_previous_health() -> None:
    table = SlotTable.empty(1, 1)
    table.record_gradients(0, 0, GradientStatistics(0.2, 0.9, vanishing=False, exploding=True), ratio=0.1)
    assert np.isnan(table.previous_health[0, 0])
    table.record_gradients(0, 0, GradientStatistics(0.3, 0.5, vanishing=True, exploding=False), ratio=0.4)
    assert (table.previous_health[0, 0], table.gradient_health[0, 0]) == (0.9, 0.5)
    assert (table.gradient_norm[0, 0], table.gradient_norm_ratio[0, 0]) == (0.3, 0.4)
    assert (table.vanishing[0, 0], table.exploding[0, 0]) == (1.0, 0.0)
