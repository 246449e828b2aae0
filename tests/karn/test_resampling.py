"""Regret, largest regret, bootstrap intervals and Holm's correction, on numbers derived by hand."""

import math

import numpy as np
import pytest
from scipy import stats

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
"""Losses of the reference arm, indexed by rng seed and budget mark."""


def test_regret_is_the_mean_over_rng_seeds_of_the_relative_excess_loss():
    # Relative excess losses of two rng seeds are 0.1 and -0.1 at the first budget mark (regret 0), 0.5 and
    # -0.1 at the second (regret 0.2).
    above = excess(np.array([[[2.2, 1.5], [3.6, 1.8]]]), REFERENCE)
    assert regret(above) == pytest.approx([0.0, 0.2])
    assert merit(above) == pytest.approx(0.2)


def test_largest_regret_is_a_mean_of_loss_ratios_and_not_a_ratio_of_mean_losses():
    # The losses 3 and 4 exceed the reference losses 2 and 4 by 50 % and 0 %, on average by 25 %, whereas the
    # sum of the losses exceeds the reference sum by 7 / 6 - 1 = 17 %.
    above = excess(np.array([[[3.0], [4.0]]]), np.array([[2.0], [4.0]]))
    assert merit(above) == pytest.approx(0.25)


def test_maximum_regret_over_budget_marks_is_recomputed_in_every_bootstrap_draw():
    # The largest regret is 1 if a bootstrap draw has the same rng seed twice (half of the draws), and 0.5 if
    # it has both rng seeds.
    found = merit_interval(np.array([[[0.0, 1.0], [1.0, 0.0]]]))
    assert found == (0.5, 0.5, 1.0)


def test_bootstrap_draws_rng_seeds_with_replacement_and_draws_the_same_rng_seeds_for_every_arm():
    values = np.array([[[0.0], [1.0]]])
    drawn = draws_of(values, 4_000)[:, 0]
    assert set(drawn) == {0.0, 0.5, 1.0}
    assert np.mean(drawn == 0.5) == pytest.approx(0.5, abs=0.05)
    assert np.array_equal(draws_of(values + 3.0, 4_000)[:, 0], drawn + 3.0)


def test_bootstrap_resamples_trainings_in_addition_to_rng_seeds():
    # The values differ between the two trainings and not between rng seeds, so a bootstrap mean is 1, 2 or 3.
    drawn = draws_of(np.array([[[1.0], [1.0]], [[3.0], [3.0]]]), 4_000)[:, 0]
    assert set(drawn) == {1.0, 2.0, 3.0}
    assert np.mean(drawn == 2.0) == pytest.approx(0.5, abs=0.05)


def test_confidence_interval_of_a_mean_contains_95_per_cent_of_the_bootstrap_draws():
    # A bootstrap draw of two values is the lower value twice or the higher value twice, each with probability
    # 1/4. The 95 % interval therefore reaches from the lower to the higher value.
    assert mean_interval(np.array([[2.0, 4.0]])) == (3.0, 2.0, 4.0)


def test_ratio_of_largest_regrets_of_two_arms_uses_the_same_bootstrap_draws_for_both_arms():
    # The regrets of one arm are half the regrets of the other arm for every rng seed, so the ratio of their
    # largest regrets is 0.5 in every bootstrap draw.
    other = np.array([[[0.1, 0.4], [0.3, 0.2], [0.2, 0.2]]])
    assert merit_ratio(other / 2, other) == pytest.approx((0.5, 0.5, 0.5))


def test_ratio_of_largest_regrets_is_infinite_if_the_regret_in_the_denominator_is_zero():
    found = merit_ratio(np.array([[[0.1], [0.2]]]), np.array([[[0.0], [0.0]]]))
    assert found == (math.inf, math.inf, math.inf)


def test_confidence_interval_and_p_value_of_a_single_value_are_nan():
    found = merit_interval(np.array([[[0.1, 0.3]]]))
    assert found.value == pytest.approx(0.3)
    assert math.isnan(found.low)
    assert math.isnan(p_value(np.array([[0.3]])))


def test_confidence_interval_and_p_value_are_nan_if_an_excess_loss_is_nan():
    above = np.array([[[0.1], [math.nan]]])
    assert all(math.isnan(number) for number in merit_interval(above))
    assert math.isnan(p_value(above[..., 0]))


def test_p_value_is_the_larger_of_the_p_value_over_rng_seeds_and_the_p_value_over_trainings():
    # Differences 1 and 3 of two rng seeds give t = 2; its p-value for one degree of freedom is 0.2952.
    assert p_value(np.array([[1.0, 3.0]])) == pytest.approx(0.2952, abs=5e-5)
    # Differences that vary only between trainings: the t-test over rng seeds has p-value 0, the t-test over
    # trainings 0.2952.
    assert p_value(np.array([[1.0, 1.0, 1.0], [3.0, 3.0, 3.0]])) == pytest.approx(0.2952, abs=5e-5)
    # The p-value of differences that are all 0 is 1.
    assert p_value(np.array([[0.0, 0.0]])) == 1.0


def test_holm_correction_multiplies_p_values_by_the_number_of_remaining_tests():
    # Holm's correction multiplies the sorted p-values 0.01, 0.03, 0.04 by 3, 2 and 1 and keeps their order,
    # so 0.04 is raised to 0.06.
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "untested": math.nan})
    assert {name: p for name, p in found.items() if name != "untested"} == pytest.approx(
        {"a": 0.03, "b": 0.06, "c": 0.06}
    )
    assert math.isnan(found["untested"])
    assert holm({"a": 0.7, "b": 0.6}) == {"a": 1.0, "b": 1.0}


# --- comparison with scipy ------------------------------------------------------------------------


def test_p_value_over_rng_seeds_and_trainings_is_the_larger_of_two_t_tests_of_scipy():
    values = np.random.default_rng(0).normal(0.5, 1.0, (4, 12))
    theirs = [stats.ttest_1samp(values.mean(axis=axis), 0.0).pvalue for axis in (0, 1)]
    assert p_value(values) == pytest.approx(max(theirs))
    assert p_value(values[:1]) == pytest.approx(stats.ttest_1samp(values[0], 0.0).pvalue)


@pytest.mark.parametrize("size", [5, 12, 30])
def test_bootstrap_interval_of_a_mean_is_close_to_the_percentile_bootstrap_of_scipy(size: int):
    values = np.random.default_rng(size).exponential(2.0, size)
    theirs = stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    found = mean_interval(values[None, :])
    assert found.value == pytest.approx(values.mean())
    # Two bootstraps of 10,000 and 20,000 draws differ by their random draws only.
    assert (found.low, found.high) == pytest.approx(tuple(theirs), abs=0.04 * (theirs.high - theirs.low))
