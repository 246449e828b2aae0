"""How fast something moves with the compute that is spent on it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Trend(NamedTuple):
    """A straight line over the logarithm of compute."""

    slope: float
    """Per doubling of the compute."""
    now: float
    """Where the line ends."""
    error: float
    """Standard error of the slope; not a number for fewer than four points."""


def per_doubling(compute: Sequence[float] | NDArray[np.float64], values: Sequence[float]) -> Trend:
    """The line of least squares through values over log2 of the compute at which they were seen."""
    doublings = np.log2(np.asarray(compute) / compute[-1])
    if len(values) < 4:
        slope, now = np.polyfit(doublings, values, 1)
        return Trend(float(slope), float(now), math.nan)
    (slope, now), covariance = np.polyfit(doublings, values, 1, cov=True)
    return Trend(float(slope), float(now), math.sqrt(covariance[0, 0]))
