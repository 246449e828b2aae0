"""Metric of a run and its format: the score of a task, or the loss of a user's network."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from esper.karn import notation
from esper.karn.statistics import Estimate
from esper.leyline.rows import MetricColumn, RunRow


class Metric(NamedTuple):
    """Metric by which networks are compared: a column of epoch and episode rows, with its direction and
    format. The method ``lead`` returns a difference that is positive for an improvement, even if lower values
    of the metric are better.
    """

    column: MetricColumn
    name: str
    """Name of the metric in texts and as a column of the telemetry table ``counterfactual``."""
    unit: str
    """Unit that follows a difference of two metric values in text."""
    lost: str
    """Meaning of a seed's contribution in words, such as "score lost"."""
    sign: int
    """Direction of the metric: 1 if higher is better, -1 if lower is better."""
    most: float | None
    """Largest possible value of the metric; None if unbounded."""
    decimals: int | None
    """Number of decimals of a metric value in text; None shows three significant digits."""

    def text(self, value: float | None) -> str:
        """Format a value of the metric as text."""
        return notation.significant(value) if self.decimals is None else notation.points(value, self.decimals)

    def gain(self, value: float | None) -> str:
        """Format a difference of two metric values, always with its sign."""
        if self.decimals is not None:
            return notation.gain(value, self.decimals)
        return notation.UNKNOWN if value is None else f"{value + 0.0:+.3g}"

    def gain_with_error(self, value: float | None, error: float | None) -> str:
        """Format a difference of two metric values with its standard error, if known."""
        return self.gain(value) + self._spread(None if value is None else error)

    def estimate(self, value: Estimate | None) -> str:
        """Format a mean of metric values with the half-width of its confidence interval, if known."""
        return notation.UNKNOWN if value is None else self.text(value.mean) + self._spread(value.margin)

    def difference(self, value: Estimate | None) -> str:
        """Format a mean difference of metric values with the half-width of its confidence interval, if
        known.
        """
        return notation.UNKNOWN if value is None else self.gain_with_error(value.mean, value.margin)

    def _spread(self, size: float | None) -> str:
        if size is None:
            return ""
        return f" ± {size:.1g}" if self.decimals is None else f" ± {size:.{self.decimals}f}"

    def lead(self, value: float | None, reference: float | None) -> float | None:
        """Return by how much the metric ``value`` is better than ``reference``; None if one of them is
        None.
        """
        return self.gained(notation.difference(value, reference))

    def gained(self, change: float | None) -> float | None:
        """Return a change of the metric as an improvement: negated if lower values are better."""
        return None if change is None else self.sign * change

    def best(self, values: Iterable[float | None]) -> float | None:
        """Return the best of the known metric values; None if no value is known."""
        return max(
            (value for value in values if value is not None), key=lambda v: self.sign * v, default=None
        )


SCORE: Final = Metric("val_score", "score", " points", "score lost", 1, 100.0, 1)
LOSS: Final = Metric("val_loss", "loss", "", "loss added", -1, None, None)


def metric_of(run: RunRow) -> Metric:
    """Return the metric by which a run is evaluated."""
    return LOSS if run.metric == LOSS.column else SCORE
