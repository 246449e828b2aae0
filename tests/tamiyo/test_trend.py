import math

import pytest

from esper.tamiyo.trend import per_doubling


def test_per_doubling_returns_slope_end_and_standard_error() -> None:
    # Values 3, 2, 1, 0 at compute 1, 2, 4, 8: slope -1 per doubling, exactly.
    trend = per_doubling([1, 2, 4, 8], [3.0, 2.0, 1.0, 0.0])
    assert (trend.slope, trend.now, trend.error) == pytest.approx((-1.0, 0.0, 0.0), abs=1e-6)
    # Residuals (1, −1, −1, 1)/2 around a level line: variance 1 / (4 − 2), over 5 = Σ (x − 1.5)².
    assert per_doubling([1, 2, 4, 8], [1.0, 0.0, 0.0, 1.0]).error == pytest.approx(math.sqrt(0.5 / 5))
