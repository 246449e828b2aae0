"""Means with confidence intervals, and means of paired differences.

If one number represents several episodes, reports, pages and terminal views show the mean.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A mean with the half-width of its 95 % confidence interval (Student's t); the half-width is NaN for a
    single value.
    """

    mean: float
    half_width: float
    size: int
    """Number of values over which the mean is taken."""

    @property
    def margin(self) -> float | None:
        """Half-width of the confidence interval; None for a single value."""
        return None if math.isnan(self.half_width) else self.half_width

    @property
    def interval(self) -> tuple[float, float]:
        """Ends (low, high) of the confidence interval; low and high equal the mean if there is only one
        value.
        """
        return self.mean - (self.margin or 0.0), self.mean + (self.margin or 0.0)

    def __str__(self) -> str:
        return f"{self.mean:.1f}" + ("" if self.margin is None else f" ± {self.margin:.1f}")


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None if no value is known."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values with its 95 % confidence interval."""
    if not values:
        raise ValueError("an estimate needs at least one value")
    count = len(values)
    if count == 1:
        return Estimate(values[0], math.nan, 1)
    error = statistics.stdev(values) / math.sqrt(count)
    return Estimate(statistics.fmean(values), _t_quantile(count - 1) * error, count)


def paired_difference(values: Sequence[float], control: Sequence[float]) -> Estimate:
    """Return the mean of ``values[i] − control[i]``, for an arm and a control that used the same rng seeds in
    the same order.
    """
    return estimate([a - b for a, b in zip(values, control, strict=True)])


def t_test(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of Student's t-test for a mean of 0; NaN for a single value or if a value
    is NaN.
    """
    degrees = len(differences) - 1
    if degrees < 1 or any(map(math.isnan, differences)):
        return math.nan
    center, deviation = statistics.fmean(differences), statistics.stdev(differences)
    if deviation == 0.0:
        return 1.0 if center == 0.0 else 0.0
    t = abs(center) / deviation * math.sqrt(degrees + 1)
    return 1.0 - _t_within(math.atan(t / math.sqrt(degrees)), degrees)


@cache
def _t_quantile(degrees: int) -> float:
    """Return the two-sided quantile of Student's t distribution at ``CONFIDENCE``."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # Find the quantile of Student's t by bisection, down to float resolution.
        middle = (low + high) / 2
        low, high = (middle, high) if _t_within(middle, degrees) < CONFIDENCE else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _t_within(angle: float, degrees: int) -> float:
    """Return P(|t| ≤ √degrees · tan(angle)) of Student's t distribution, computed as a finite series."""
    is_odd, square = degrees % 2, math.cos(angle) ** 2
    term, total = math.cos(angle) if is_odd else 1.0, 0.0
    for k in range(2 + is_odd, degrees + 1, 2):
        total += term
        term *= square * (k - 1) / k
    return 2 / math.pi * (angle + math.sin(angle) * total) if is_odd else math.sin(angle) * total
