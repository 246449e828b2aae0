import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.simic.rewards.terms import (
    churn,
    contribution_potential,
    final_potential,
    loss_potential,
    paired_potential,
    rent_potential,
    rollback,
)

NAN = math.nan


def test_a_lead_of_a_hundred_points_over_the_twin_is_one() -> None:
    # 62.5 against 50, 40 against 50, 100 against 0
    found = paired_potential(np.array([62.5, 40.0, 100.0]), np.array([50.0, 50.0, 0.0]))
    assert found.tolist() == pytest.approx([0.125, -0.1, 1.0])


def test_contributions_of_the_slots_that_count_add_up() -> None:
    measured = np.array([[2.5, 4.0, 10.0], [-3.0, 1.0, 0.5], [7.0, 7.0, 7.0]])
    counts = np.array([[True, True, False], [True, True, True], [False, False, False]])
    # 2.5 + 4; −3 + 1 + 0.5; nothing
    assert contribution_potential(measured, counts).tolist() == pytest.approx([0.065, -0.015, 0.0])


def test_a_contribution_that_nobody_measured_counts_for_nothing() -> None:
    measured = np.array([[NAN, 2.0, NAN], [NAN, NAN, NAN]])
    found = contribution_potential(measured, np.array([[True, True, False], [True, True, True]]))
    assert found.tolist() == pytest.approx([0.02, 0.0])


def test_a_loss_is_measured_in_blind_guesses_and_its_improvement_is_positive() -> None:
    guess = math.log(10)
    before, after = loss_potential(np.array([guess, 1.2]), guess), loss_potential(np.array([0.0, 0.9]), guess)
    assert before.tolist() == pytest.approx([-1.0, -0.521153], abs=1e-6)
    assert (after - before).tolist() == pytest.approx([1.0, 0.3 / 2.302585], abs=1e-6)


def test_only_a_finished_episode_is_worth_its_score() -> None:
    assert final_potential(np.array([80.0, 80.0]), np.array([True, False])).tolist() == [0.8, 0.0]


def test_rent_is_due_per_thousand_parameters_and_never_pays() -> None:
    found = rent_potential(np.array([0.0, 500.0, 2500.0]), 0.02)
    assert found.tolist() == pytest.approx([0.0, -0.01, -0.05])


@given(st.integers(0, 10**9), st.floats(0.0, 1e3))
def test_no_number_of_parameters_and_no_price_makes_rent_positive(params: int, price: float) -> None:
    assert rent_potential(np.array([float(params)]), price)[0] <= 0.0


def test_a_removal_costs_one_point_of_score() -> None:
    assert churn(np.array([True, False])).tolist() == [-0.01, 0.0]


def test_a_breakdown_costs_twenty_points_of_score() -> None:
    assert rollback(np.array([True, False])).tolist() == [-0.2, 0.0]
