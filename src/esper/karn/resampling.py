"""What arms of a study are worth, with intervals by bootstrap (Efron 1979).

An arm is an array ``[training, rng seed, mark]``; one training unless a policy was trained several times.
A draw takes as many rng seeds as there are, with replacement, and the same ones for every arm, so that pairs
stay pairs; likewise of the trainings. The maximum over marks is taken anew in every draw.
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
    """A statistic and the middle 95 % of its draws; both ends are NaN where nothing could be drawn."""

    value: float
    low: float
    high: float


def excess(losses: FloatArray, reference: FloatArray) -> FloatArray:
    """(loss − reference) / reference, ``[training, rng seed, mark]`` against ``[rng seed, mark]``."""
    return (losses - reference) / reference


def regret(above: FloatArray) -> FloatArray:
    """``[mark]``: the mean of ``excess`` over trainings and rng seeds; negative values count."""
    return above.mean(axis=(0, 1))


def merit(above: FloatArray) -> float:
    """The largest regret over marks."""
    return float(regret(above).max())


def draws_of(values: FloatArray, count: int = DRAWS) -> FloatArray:
    """``[draw, mark]``: means over drawn trainings and rng seeds of ``values [training, rng seed, mark]``."""
    shares = (
        np.random.default_rng(stream).multinomial(size, [1 / size] * size, count) / size
        for stream, size in enumerate(values.shape[:2])
    )
    drawn: FloatArray = np.einsum("dt,ds,tsm->dm", *shares, values, optimize=True)
    return drawn


def mean_interval(values: FloatArray) -> Interval:
    """Of the mean over trainings and rng seeds; ``values [training, rng seed]``."""
    return _interval(float(values.mean()), draws_of(values[..., None])[:, 0], values.shape)


def merit_interval(above: FloatArray) -> Interval:
    """Of the largest regret."""
    return _interval(merit(above), draws_of(above).max(axis=1), above.shape)


def merit_ratio(above: FloatArray, other: FloatArray) -> Interval:
    """The largest regret as a multiple of another arm's, infinite where the other has none to speak of."""
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
    """``[training, rng seed]``: differences by rng seed, and by training where both arms have as many."""
    alike = 1 in (len(scores), len(control)) or len(scores) == len(control)
    return scores - (control if alike else control.mean(axis=0, keepdims=True))


def p_value(differences: FloatArray) -> float:
    """Two-sided, of a mean difference of 0, by Student's t; ``differences [training, rng seed]``.

    The larger of that over rng seeds and that over trainings, each the mean over the other. Draws are of no
    use here: of few values they show far too rarely what lies outside of them.
    """
    axes = [axis for axis in (0, 1) if differences.shape[1 - axis] > 1]
    return max((t_test(differences.mean(axis=axis).tolist()) for axis in axes), default=math.nan)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Each p-value times the number of those not smaller, never below one before it (Holm 1979).

    What is NaN was not tested and does not count.
    """
    tested = sorted((p, name) for name, p in p_values.items() if not math.isnan(p))
    adjusted, least = dict.fromkeys(p_values, math.nan), 0.0
    for rank, (p, name) in enumerate(tested):
        least = max(least, min(1.0, (len(tested) - rank) * p))
        adjusted[name] = least
    return adjusted
