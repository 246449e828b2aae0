"""Regret, merit, their intervals and Holm's correction, on numbers derived by hand."""

import math

import numpy as np
import pytest

from esper.karn.resampling import (
    draws_of,
    excess,
    holm,
    mean_interval,
    merit,
    merit_interval,
    merit_ratio,
    p_value,
    regret,
)

REFERENCE = np.array([[2.0, 1.0], [4.0, 2.0]])
"""``[rng seed, mark]``"""


def test_regret_is_the_mean_of_relative_excesses_and_may_be_negative():
    # Mark 0: (2.2 - 2) / 2 = 0.1 and (3.6 - 4) / 4 = -0.1, mean 0. Mark 1: 0.5 and -0.1, mean 0.2.
    above = excess(np.array([[[2.2, 1.5], [3.6, 1.8]]]), REFERENCE)
    assert regret(above) == pytest.approx([0.0, 0.2])
    assert merit(above) == pytest.approx(0.2)


def test_mean_of_ratios_differs_from_ratio_of_means():
    # Losses 3 and 4 against 2 and 4: excesses 0.5 and 0, mean 0.25. The ratio of sums would be 7 / 6 - 1.
    above = excess(np.array([[[3.0], [4.0]]]), np.array([[2.0], [4.0]]))
    assert merit(above) == pytest.approx(0.25)


def test_maximum_over_marks_is_recomputed_in_every_draw():
    # Two rng seeds whose worst marks differ: [0, 1] and [1, 0]. The mean is 0.5 at both marks, and so is the
    # merit; but half of the draws take one rng seed twice, and then it is 1. No draw is below 0.5.
    found = merit_interval(np.array([[[0.0, 1.0], [1.0, 0.0]]]))
    assert found == (0.5, 0.5, 1.0)


def test_rng_seeds_are_drawn_with_replacement_and_equally_for_every_arm():
    values = np.array([[[0.0], [1.0]]])
    drawn = draws_of(values, 4_000)[:, 0]
    assert set(drawn) == {0.0, 0.5, 1.0}
    assert np.mean(drawn == 0.5) == pytest.approx(0.5, abs=0.05)
    assert np.array_equal(draws_of(values + 3.0, 4_000)[:, 0], drawn + 3.0)


def test_trainings_are_resampled_as_well():
    # Both trainings have one value for all rng seeds, so only the draw of trainings varies: 1, 2 or 3.
    drawn = draws_of(np.array([[[1.0], [1.0]], [[3.0], [3.0]]]), 4_000)[:, 0]
    assert set(drawn) == {1.0, 2.0, 3.0}
    assert np.mean(drawn == 2.0) == pytest.approx(0.5, abs=0.05)


def test_interval_of_a_mean_contains_95_per_cent_of_the_draws():
    # Of two values each end is drawn twice with probability 1/4: far more than 2.5 %.
    assert mean_interval(np.array([[2.0, 4.0]])) == (3.0, 2.0, 4.0)


def test_merit_ratio_uses_the_same_draw_for_both_arms():
    # One arm is half of the other for every rng seed: so is its merit in every draw.
    other = np.array([[[0.1, 0.4], [0.3, 0.2], [0.2, 0.2]]])
    assert merit_ratio(other / 2, other) == pytest.approx((0.5, 0.5, 0.5))


def test_merit_ratio_is_infinite_if_the_other_regret_is_not_positive():
    found = merit_ratio(np.array([[[0.1], [0.2]]]), np.array([[[0.0], [0.0]]]))
    assert found == (math.inf, math.inf, math.inf)


def test_single_value_has_no_interval_and_no_p_value():
    found = merit_interval(np.array([[[0.1, 0.3]]]))
    assert found.value == pytest.approx(0.3)
    assert math.isnan(found.low)
    assert math.isnan(p_value(np.array([[0.3]])))


def test_nan_input_gives_nan_statistics():
    above = np.array([[[0.1], [math.nan]]])
    assert all(math.isnan(number) for number in merit_interval(above))
    assert math.isnan(p_value(above[..., 0]))


def test_p_value_is_the_larger_of_rng_seeds_and_trainings():
    # 1 and 3: mean 2, deviation √2, error 1, so t = 2; for one degree P(|t| > 2) = 1 - 2/π · atan 2 = 0.2952.
    assert p_value(np.array([[1.0, 3.0]])) == pytest.approx(0.2952, abs=5e-5)
    # Two trainings, 1 and 3 for every rng seed: p over rng seeds is 0, over trainings 0.2952.
    assert p_value(np.array([[1.0, 1.0, 1.0], [3.0, 3.0, 3.0]])) == pytest.approx(0.2952, abs=5e-5)
    # All differences 0: p is 1.
    assert p_value(np.array([[0.0, 0.0]])) == 1.0


def test_holm_multiplies_by_the_number_of_remaining_tests():
    # Sorted 0.01, 0.03, 0.04: times 3, 2 and 1 are 0.03, 0.06, 0.04; the last must not be below 0.06.
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "untested": math.nan})
    assert {name: p for name, p in found.items() if name != "untested"} == pytest.approx(
        {"a": 0.03, "b": 0.06, "c": 0.06}
    )
    assert math.isnan(found["untested"])
    assert holm({"a": 0.7, "b": 0.6}) == {"a": 1.0, "b": 1.0}
