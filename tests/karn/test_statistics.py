"""Confidence intervals compared with tables of Student's t, and paired differences derived by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from esper.karn.statistics import estimate, paired_difference, t_test


@pytest.mark.parametrize(
    ("values", "quantile"),
    [(2, 12.7062), (3, 4.3027), (4, 3.1824), (10, 2.2622), (11, 2.2281), (31, 2.0423), (101, 1.9840)],
)
def test_half_width_of_a_confidence_interval_is_the_t_quantile_times_the_standard_error(
    values: int, quantile: float
) -> None:
    """If one of N values is 1 and the rest are 0, the standard error of the mean is 1/N."""
    found = estimate([1.0] + [0.0] * (values - 1))
    assert found.mean == pytest.approx(1 / values)
    assert found.half_width * values == pytest.approx(quantile, abs=5e-5)
    assert found.size == values


def test_single_value_has_no_confidence_interval() -> None:
    assert estimate([4.0]).mean == 4.0
    assert math.isnan(estimate([4.0]).half_width)


def test_paired_difference_of_two_arms_is_the_mean_difference_with_its_confidence_interval() -> None:
    """Differences 1 and 3 have mean 2, standard error 1 and one degree of freedom (t quantile 12.706)."""
    found = paired_difference([5.0, 8.0], [4.0, 5.0])
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(12.7062, abs=5e-5)


def test_paired_difference_of_arms_with_different_numbers_of_values_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        paired_difference([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="at least one"):
        estimate([])


@pytest.mark.parametrize(
    ("values", "expected"), [([1.0, 3.0], 0.2952), ([1.0, 2.0, 3.0], 0.0742), ([-1.0, -2.0, -3.0], 0.0742)]
)
def test_p_value_of_the_t_test_is_two_sided(values: list[float], expected: float) -> None:
    """The p-value of t = 2 with one degree of freedom is 0.2952, that of t = ±3.46 with two is 0.0742."""
    assert t_test(values) == pytest.approx(expected, abs=5e-5)


# --- comparison with scipy ------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 4, 7, 20, 100])
def test_confidence_interval_and_p_value_equal_those_of_scipy(count: int) -> None:
    values = np.random.default_rng(count).normal(0.3, 1.0, count)
    low, high = stats.t.interval(0.95, count - 1, values.mean(), stats.sem(values))
    assert estimate(values.tolist()).interval == pytest.approx((low, high), rel=1e-9)
    assert t_test(values.tolist()) == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue, rel=1e-7)
