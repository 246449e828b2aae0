"""Linear trend of a metric over the logarithm of compute."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Trend(NamedTuple):
    """Linear fit of a metric over log2(compute)."""

    slope: float
    """Change of the metric per doubling of compute."""
    now: float
    """Metric at the last point, according to the fitted line."""
    error: float
    """Standard error of ``slope``."""


def per_doubling(compute: Sequence[float] | NDArray[np.float64], values: Sequence[float]) -> Trend:
    """Return the least-squares line of ``values`` over log2(``compute``), for at least three points."""
    doublings = np.log2(np.asarray(compute) / compute[-1])
    (slope, now), covariance = np.polyfit(doublings, values, 1, cov=True)
    return Trend(float(slope), float(now), math.sqrt(covariance[0, 0]))
