"""Regret, largest regret, bootstrap intervals and Holm's correction, on numbers derived by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from esper.karn.resampling import (
    DRAWS,
    compute_needed,
    holm,
    interval,
    largest,
    mean_interval,
    means,
    p_value,
    regrets,
)

REFERENCE = np.array([[[2.0, 1.0], [4.0, 2.0]]])
"""Losses of one static configuration, indexed by configuration, rng seed and budget mark."""
BOTH = np.array([True, True])


def test_regret_is_the_mean_over_rng_seeds_of_the_relative_excess_loss():
    # Relative excess losses of two rng seeds are 0.1 and -0.1 at the first budget mark (regret 0), 0.5 and
    # -0.1 at the second (regret 0.2).
    above = regrets(np.array([[[2.2, 1.5], [3.6, 1.8]]]), REFERENCE)
    assert above[0] == pytest.approx([0.0, 0.2])
    assert largest(above, BOTH)[0] == pytest.approx(0.2)


def test_regret_is_a_mean_of_loss_ratios_and_not_a_ratio_of_mean_losses():
    # The losses 3 and 4 exceed the reference losses 2 and 4 by 50 % and 0 %, on average by 25 %, whereas the
    # sum of the losses exceeds the reference sum by 7 / 6 - 1 = 17 %.
    above = regrets(np.array([[[3.0], [4.0]]]), np.array([[[2.0], [4.0]]]))
    assert above[0] == pytest.approx([0.25])


def test_best_static_configuration_is_chosen_at_each_mark_in_hindsight():
    # The mean losses are 3 and 1.5 for the first configuration, 4 and 1 for the second.
    static = np.array([[[2.0, 1.0], [4.0, 2.0]], [[3.0, 0.5], [5.0, 1.5]]])
    above = regrets(np.array([[[2.0, 1.0], [4.0, 3.0]]]), static)
    assert above[0] == pytest.approx([0.0, 1.0])


def test_best_static_configuration_is_chosen_again_in_every_bootstrap_draw():
    # The configurations have the losses 1 and 3, and 2 and 2.4, of two rng seeds. The first is better on
    # average (2 < 2.2), and in draws of the first rng seed alone; the second is better in draws of the second
    # rng seed alone. So the regret of the losses 2 and 3 is (1 + 0) / 2, 2 / 1 - 1, or 3 / 2.4 - 1.
    static = np.array([[[1.0], [3.0]], [[2.0], [2.4]]])
    above = regrets(np.array([[[2.0], [3.0]]]), static)[:, 0]
    assert above[0] == pytest.approx(0.5)
    assert {round(value, 9) for value in above} == {0.5, 1.0, 0.25}
    assert np.mean(np.isclose(above[1:], 0.25)) == pytest.approx(0.25, abs=0.02)


def test_static_configuration_that_diverged_with_one_rng_seed_is_not_the_reference():
    static = np.array([[[math.nan], [0.1]], [[2.0], [2.0]]])
    assert set(regrets(np.array([[[3.0], [3.0]]]), static)[:, 0]) == {0.5}


def test_maximum_regret_over_budget_marks_is_recomputed_in_every_bootstrap_draw():
    # The largest regret is 1 if a bootstrap draw has the same rng seed twice (half of the draws), and 0.5 if
    # it has both rng seeds.
    above = regrets(np.array([[[1.0, 2.0], [2.0, 1.0]]]), np.ones((1, 2, 2)))
    assert interval(largest(above, BOTH)) == (0.5, 0.5, 1.0)


def test_largest_regret_leaves_out_marks_without_a_result_and_marks_that_are_not_asked_for():
    above = np.array([[math.nan, 0.4, 0.1, 0.2], [math.nan, 0.5, 0.3, 0.1]])
    assert largest(above, np.array([True] * 4)).tolist() == [0.4, 0.5]
    assert largest(above, np.array([True, False, True, True])).tolist() == [0.2, 0.3]
    assert np.isnan(largest(above, np.array([True, False, False, False]))).all()


def test_compute_that_the_static_frontier_needs_is_interpolated_in_logarithms():
    # The frontier falls from 4 to 2 to 1 while the compute doubles twice. It has the loss 2 at 1/2, the loss
    # 2.83 (halfway in logarithms) at 0.35, and the loss 1 only at 1.
    marks, frontier = (0.25, 0.5, 1.0), np.array([4.0, 2.0, 1.0])
    found = compute_needed(np.array([2.0, math.sqrt(8.0), 1.0]), frontier, marks)
    assert found == pytest.approx([2.0, math.sqrt(0.5), 1.0])


def test_compute_that_the_static_frontier_needs_is_unknown_or_infinite_outside_of_its_losses():
    # The frontier stays at 2 if later marks have larger losses; it has the loss 2.83 at 0.125 × √2.
    marks, frontier = (0.125, 0.25, 0.5, 1.0), np.array([4.0, 2.0, 3.0, 2.5])
    found = compute_needed(np.array([5.0, 2.0, 0.9, math.sqrt(8.0)]), frontier, marks)
    assert math.isnan(found[0])
    assert found[1:] == pytest.approx([1.0, math.inf, 0.125 * math.sqrt(2)])


def test_bootstrap_draws_rng_seeds_with_replacement_and_draws_the_same_rng_seeds_for_every_arm():
    values = np.array([[[0.0], [1.0]]])
    drawn = means(values)[:, 0]
    assert set(drawn) == {0.0, 0.5, 1.0}
    assert np.mean(drawn == 0.5) == pytest.approx(0.5, abs=0.05)
    assert np.array_equal(means(values + 3.0)[:, 0], drawn + 3.0)


def test_bootstrap_resamples_trainings_in_addition_to_rng_seeds():
    # The values differ between the two trainings and not between rng seeds, so a bootstrap mean is 1, 2 or 3.
    drawn = means(np.array([[[1.0], [1.0]], [[3.0], [3.0]]]))[:, 0]
    assert set(drawn) == {1.0, 2.0, 3.0}
    assert np.mean(drawn == 2.0) == pytest.approx(0.5, abs=0.05)


def test_confidence_interval_of_a_mean_contains_95_per_cent_of_the_bootstrap_draws():
    # A bootstrap draw of two values is the lower value twice or the higher value twice, each with probability
    # 1/4. The 95 % interval therefore reaches from the lower to the higher value.
    assert mean_interval(np.array([[2.0, 4.0]])) == (3.0, 2.0, 4.0)


def test_confidence_interval_and_p_value_of_a_single_value_are_nan():
    found = interval(largest(regrets(np.array([[[1.1, 1.3]]]), np.ones((1, 1, 2))), BOTH))
    assert found.value == pytest.approx(0.3)
    assert math.isnan(found.low)
    assert math.isnan(p_value(np.array([[0.3]])))


def test_confidence_interval_and_p_value_are_nan_if_a_loss_is_nan():
    losses = np.array([[[0.1], [math.nan]]])
    above = largest(regrets(losses, np.ones((1, 2, 1))), np.array([True]))
    assert len(above) == DRAWS + 1
    assert all(math.isnan(number) for number in interval(above))
    assert math.isnan(p_value(losses[..., 0]))


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
