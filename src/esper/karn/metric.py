"""What a run is decided by, and how its values read: the score of a task, or the loss of a user's network."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from esper.karn import notation
from esper.karn.statistics import Estimate
from esper.leyline.events import MetricColumn, RunRow


class Metric(NamedTuple):
    """A column of epochs and episodes; differences of it are positive where something helps."""

    column: MetricColumn
    name: str
    """In words, and as a column of counterfactuals."""
    unit: str
    """Behind a difference."""
    lost: str
    """What a contribution is."""
    sign: int
    """1: higher is better; -1: lower is."""
    most: float | None
    """The largest value that there can be."""
    decimals: int | None
    """None: a number of any size."""

    def text(self, value: float | None) -> str:
        return notation.significant(value) if self.decimals is None else notation.points(value, self.decimals)

    def gain(self, value: float | None) -> str:
        """A difference, always with its sign."""
        if self.decimals is not None:
            return notation.gain(value, self.decimals)
        return notation.UNKNOWN if value is None else f"{value + 0.0:+.3g}"

    def gain_with_error(self, value: float | None, error: float | None) -> str:
        """A measured difference and its standard error, where that is known."""
        return self.gain(value) + self._spread(None if value is None else error)

    def estimate(self, value: Estimate | None) -> str:
        """A mean with its interval, where it has one."""
        return notation.UNKNOWN if value is None else self.text(value.mean) + self._spread(value.margin)

    def _spread(self, size: float | None) -> str:
        if size is None:
            return ""
        return f" ± {size:.1g}" if self.decimals is None else f" ± {size:.{self.decimals}f}"

    def lead(self, value: float | None, reference: float | None) -> float | None:
        """By how much ``value`` is better, unknown if either is."""
        return self.gained(notation.difference(value, reference))

    def gained(self, change: float | None) -> float | None:
        """A change of the value as a gain."""
        return None if change is None else self.sign * change

    def best(self, values: Iterable[float | None]) -> float | None:
        """Of what is known."""
        return max(
            (value for value in values if value is not None), key=lambda v: self.sign * v, default=None
        )


SCORE: Final = Metric("val_score", "score", " points", "score lost", 1, 100.0, 1)
LOSS: Final = Metric("val_loss", "loss", "", "loss added", -1, None, None)


def metric_of(run: RunRow) -> Metric:
    return LOSS if run.metric == LOSS.column else SCORE
