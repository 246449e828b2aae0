"""Regret and score statistics of the arms of a study, with bootstrap intervals (Efron 1979).

The losses of an arm have the shape ``[training, rng seed, mark]``; only an arm with a trained policy can have
several trainings. Each bootstrap draw resamples rng seeds with replacement. All arms use the same draws of
rng seeds, so arms stay paired. The trainings of an arm are resampled with replacement, too. The largest
regret over compute marks is recomputed in every bootstrap draw.
"""

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.karn.statistics import CONFIDENCE, t_test

FloatArray = NDArray[np.float64]
DRAWS: Final = 10_000


class Interval(NamedTuple):
    """A statistic and the middle 95 % of its bootstrap draws; ``low`` and ``high`` are NaN if the statistic
    is of a single value.
    """

    value: float
    low: float
    high: float


def excess(losses: FloatArray, reference: FloatArray) -> FloatArray:
    """Return relative excess losses, (loss − reference) / reference, with shape ``[training, rng seed,
    mark]``. The reference, such as the loss of the best static size (a host that never grows), has shape
    ``[rng seed, mark]``.
    """
    return (losses - reference) / reference


def regret(above: FloatArray) -> FloatArray:
    """Return the regret ``[mark]``: the mean of relative excess losses over trainings and rng seeds, which
    may be negative.
    """
    return above.mean(axis=(0, 1))


def merit(above: FloatArray) -> float:
    """Return the largest regret over the compute marks of an arm."""
    return float(regret(above).max())


def draws_of(values: FloatArray, count: int = DRAWS) -> FloatArray:
    """Return bootstrap means ``[draw, mark]`` of ``values [training, rng seed, mark]``."""
    shares = (
        np.random.default_rng(stream).multinomial(size, [1 / size] * size, count) / size
        for stream, size in enumerate(values.shape[:2])
    )
    drawn: FloatArray = np.einsum("dt,ds,tsm->dm", *shares, values, optimize=True)
    return drawn


def mean_interval(values: FloatArray) -> Interval:
    """Return the mean of ``values [training, rng seed]`` with its bootstrap interval."""
    return _interval(float(values.mean()), draws_of(values[..., None])[:, 0], values.shape)


def merit_interval(above: FloatArray) -> Interval:
    """Return the largest regret over compute marks with its bootstrap interval."""
    return _interval(merit(above), draws_of(above).max(axis=1), above.shape)


def merit_ratio(above: FloatArray, other: FloatArray) -> Interval:
    """Return the ratio of two arms' largest regrets with its bootstrap interval; infinite if the denominator
    is ≤ 0.
    """
    drawn = [
        _quotient(*pair) for pair in zip(*(draws_of(a).max(axis=1) for a in (above, other)), strict=True)
    ]
    return _interval(_quotient(merit(above), merit(other)), np.array(drawn), above.shape)


def _quotient(one: float, other: float) -> float:
    return one / other if other > 0 or math.isnan(other) else math.inf


def _interval(value: float, drawn: FloatArray, shape: tuple[int, ...]) -> Interval:
    if shape[0] * shape[1] == 1 or math.isnan(value):
        return Interval(value, math.nan, math.nan)
    tail = (1.0 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tail, 1.0 - tail], method="nearest")
    return Interval(value, float(low), float(high))


def paired(scores: FloatArray, control: FloatArray) -> FloatArray:
    """Return the differences of scores between two arms, with shape ``[training, rng seed]``. The scores are
    paired by rng seed, and also by training if both arms have the same number of trainings.
    """
    alike = 1 in (len(scores), len(control)) or len(scores) == len(control)
    return scores - (control if alike else control.mean(axis=0, keepdims=True))


def p_value(differences: FloatArray) -> float:
    """Return the two-sided p-value of ``differences [training, rng seed]`` by Student's t-test.

    The returned p-value is the larger of two: over rng seeds (differences averaged over trainings), and over
    trainings (differences averaged over rng seeds). A bootstrap test is not used, because its p-values are
    too small for few values.
    """
    axes = [axis for axis in (0, 1) if differences.shape[1 - axis] > 1]
    return max((t_test(differences.mean(axis=axis).tolist()) for axis in axes), default=math.nan)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjust p-values for multiple tests by the method of Holm (1979); a p-value of NaN stands for a test
    that was not made.
    """
    tested = sorted((p, name) for name, p in p_values.items() if not math.isnan(p))
    adjusted, least = dict.fromkeys(p_values, math.nan), 0.0
    for rank, (p, name) in enumerate(tested):
        least = max(least, min(1.0, (len(tested) - rank) * p))
        adjusted[name] = least
    return adjusted
