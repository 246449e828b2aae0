"""Means with their intervals, and paired differences: what makes two numbers comparable.

One number that stands for several episodes is their mean, on every surface.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A mean with the half-width of its 95 % interval (Student's t); unknown for a single value."""

    mean: float
    half_width: float
    size: int
    """How many values it rests on."""

    @property
    def margin(self) -> float | None:
        """The half-width where it is known."""
        return None if math.isnan(self.half_width) else self.half_width

    @property
    def interval(self) -> tuple[float, float]:
        """Its ends, both the mean for a single value."""
        return self.mean - (self.margin or 0.0), self.mean + (self.margin or 0.0)

    def __str__(self) -> str:
        return f"{self.mean:.1f}" + ("" if self.margin is None else f" ± {self.margin:.1f}")


def mean(values: Iterable[float | None]) -> float | None:
    """Of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of independent values and its interval."""
    if not values:
        raise ValueError("an estimate needs at least one value")
    count = len(values)
    if count == 1:
        return Estimate(values[0], math.nan, 1)
    error = statistics.stdev(values) / math.sqrt(count)
    return Estimate(statistics.fmean(values), _t_quantile(count - 1) * error, count)


def paired_difference(values: Sequence[float], control: Sequence[float]) -> Estimate:
    """Mean of ``values[i] − control[i]``: both arms were run with the same rng seeds, in the same order."""
    return estimate([a - b for a, b in zip(values, control, strict=True)])


def t_test(differences: Sequence[float]) -> float:
    """How likely a mean at least as far from 0 is if the true one is 0: two-sided, by Student's t.

    Unknown for a single value, or where one is unknown.
    """
    degrees = len(differences) - 1
    if degrees < 1 or any(map(math.isnan, differences)):
        return math.nan
    center, deviation = statistics.fmean(differences), statistics.stdev(differences)
    if deviation == 0.0:
        return 1.0 if center == 0.0 else 0.0
    t = abs(center) / deviation * math.sqrt(degrees + 1)
    return 1.0 - _t_within(math.atan(t / math.sqrt(degrees)), degrees)


def _t_quantile(degrees: int) -> float:
    """How far from 0, in standard errors, Student's t stays with probability ``CONFIDENCE``."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # halves the angle until a float cannot tell
        middle = (low + high) / 2
        low, high = (middle, high) if _t_within(middle, degrees) < CONFIDENCE else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _t_within(angle: float, degrees: int) -> float:
    """P(|t| ≤ √degrees · tan(angle)), by the finite series for whole degrees of freedom."""
    is_odd, square = degrees % 2, math.cos(angle) ** 2
    term, total = math.cos(angle) if is_odd else 1.0, 0.0
    for k in range(2 + is_odd, degrees + 1, 2):
        total += term
        term *= square * (k - 1) / k
    return 2 / math.pi * (angle + math.sin(angle) * total) if is_odd else math.sin(angle) * total
