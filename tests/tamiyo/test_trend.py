import math

import pytest

from esper.tamiyo.trend import per_doubling


def test_function_per_doubling_returns_slope_last_fitted_value_and_standard_error() -> None:
    # Values 3, 2, 1, 0 at compute 1, 2, 4, 8 have a slope of exactly -1 per doubling of compute.
    trend = per_doubling([1, 2, 4, 8], [3.0, 2.0, 1.0, 0.0])
    assert (trend.slope, trend.now, trend.error) == pytest.approx((-1.0, 0.0, 0.0), abs=1e-6)
    # Residuals ±0.5 of four points around a fit of slope 0 have variance 1 / (4 − 2) = 0.5.
    # Squared standard error of the slope: variance 0.5 of the residuals divided by Σ (x − mean x)² = 5.
    assert per_doubling([1, 2, 4, 8], [1.0, 0.0, 0.0, 1.0]).error == pytest.approx(math.sqrt(0.5 / 5))
