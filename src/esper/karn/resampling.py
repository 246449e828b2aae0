"""Regret and score statistics of the arms of a study, with bootstrap intervals (Efron 1979).

The losses of an arm have the shape ``[training, rng seed, mark]``; only an arm with a trained policy can have
several trainings. Each bootstrap draw resamples rng seeds with replacement. All arms use the same draws of
rng seeds, so arms stay paired. The trainings of an arm are resampled with replacement, too.

Functions of the draws return arrays ``[draw, …]`` whose first row is the observed value; ``interval`` turns
such an array into a value with its interval. Every choice in hindsight (the best static configuration, the
largest regret) is repeated in every draw.
"""

import math
from collections.abc import Mapping, Sequence
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


def _shares(shape: Sequence[int]) -> list[FloatArray]:
    """Return the shares of trainings ``[draw, training]`` and of rng seeds ``[draw, rng seed]``; a single run
    has no bootstrap draws.
    """
    count = DRAWS if shape[0] * shape[1] > 1 else 0
    drawn = (
        np.random.default_rng(stream).multinomial(size, [1 / size] * size, count) / size
        for stream, size in enumerate(shape[:2])
    )
    return [np.vstack([np.full(own.shape[1], 1 / own.shape[1]), own]) for own in drawn]


def means(values: FloatArray) -> FloatArray:
    """Return the means ``[draw, mark]`` of ``values [training, rng seed, mark]``."""
    drawn: FloatArray = np.einsum("dt,ds,tsm->dm", *_shares(values.shape), values, optimize=True)
    return drawn


def regrets(losses: FloatArray, static: FloatArray) -> FloatArray:
    """Return the regret ``[draw, mark]`` of an arm against the static configuration that is best in
    hindsight.

    In every draw and at every mark the configuration with the least mean loss is chosen. The regret is the
    mean over trainings and rng seeds of (loss − loss of that configuration with the same rng seed) / the
    latter; it may be negative.

    Args:
        losses: Losses of the arm, ``[training, rng seed, mark]``.
        static: Losses of all static configurations (size and learning rate), ``[configuration, rng seed,
            mark]``; a configuration with a NaN is never chosen at that mark.
    """
    trainings, seeds = _shares(losses.shape)
    mean = np.einsum("ds,csm->dcm", seeds, static)
    best = np.where(np.isnan(mean), np.inf, mean).argmin(axis=1)
    ratios = losses / static[:, None] - 1.0
    above = np.einsum("dt,ds,ctsm->dcm", trainings, seeds, ratios, optimize=True)
    chosen: FloatArray = np.take_along_axis(above, best[:, None], axis=1)[:, 0]
    return chosen


def largest(above: FloatArray, marks: NDArray[np.bool_]) -> FloatArray:
    """Return the largest of the regrets ``above [draw, mark]`` at ``marks``, ``[draw]``.

    Marks at which the arm has no result are left out; NaN if no mark remains.
    """
    wanted = ~np.isnan(above[0]) & marks
    return above[:, wanted].max(axis=1) if wanted.any() else np.full(len(above), np.nan)


def interval(drawn: FloatArray) -> Interval:
    """Return the observed value and its bootstrap interval from ``drawn [draw]``."""
    value, tail = float(drawn[0]), (1.0 - CONFIDENCE) / 2
    if len(drawn) == 1 or math.isnan(value):
        return Interval(value, math.nan, math.nan)
    low, high = np.quantile(drawn[1:], [tail, 1.0 - tail], method="nearest")
    return Interval(value, float(low), float(high))


def mean_interval(values: FloatArray) -> Interval:
    """Return the mean of ``values [training, rng seed]`` with its bootstrap interval."""
    return interval(means(values[..., None])[:, 0])


def compute_needed(losses: FloatArray, frontier: FloatArray, marks: Sequence[float]) -> FloatArray:
    """Return the compute that the static frontier needs for the losses of an arm, as a multiple of the arm's
    compute, ``[mark]``; above 1 the arm saves compute.

    The frontier is interpolated between marks, in logarithms of loss and compute. The result is infinite for
    losses that it does not reach, and NaN for losses above that at its first mark.

    Args:
        losses: Mean losses of the arm, ``[mark]``.
        frontier: Least mean losses of all static configurations, ``[mark]``.
        marks: Compute at the marks.
    """
    best = np.minimum.accumulate(frontier)
    lower = np.append(True, best[1:] < best[:-1])
    known, at = -np.log(best[lower]), np.log(marks)
    needed = np.interp(-np.log(losses), known, at[lower], left=np.nan, right=np.inf)
    return np.asarray(np.exp(needed - at))


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
