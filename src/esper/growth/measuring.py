"""What seeds are worth by the user's own metric: evaluate with all of them, then with one switched off."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from esper.growth.sites import call
from esper.growth.slot import GrowthSlot
from esper.leyline.errors import EsperError, HostError
from esper.tolaria.calibration import CALIBRATION_SAMPLES, batch_norms, fresh_statistics, kept_statistics

Evaluate = Callable[[], Any]
"""Returns the metric as a number, or its values batch by batch."""
_FORM: Final = "it must return a number, or a sequence of numbers, one per batch"


@dataclass(frozen=True, slots=True)
class Score:
    """The metric of one configuration, higher is better; batch by batch where that is known."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    def minus(self, other: Score) -> tuple[float, float]:
        """Mean difference and its standard error over paired batches; NaN with fewer than two."""
        if len(self.values) != len(other.values):
            raise EsperError(
                f"evaluate returned {len(self.values)} values and, with a seed switched off,"
                f" {len(other.values)}; it must go over the same batches each time"
            )
        pairs = [a - b for a, b in zip(self.values, other.values, strict=True)]
        if len(pairs) < 2:
            return pairs[0], math.nan
        return statistics.fmean(pairs), statistics.stdev(pairs) / math.sqrt(len(pairs))


@contextmanager
def same_draws(position: Tensor) -> Iterator[None]:
    """Draw from ``position`` on inside, and go on outside as if nothing had been drawn."""
    outer = torch.get_rng_state()
    torch.set_rng_state(position)
    try:
        yield
    finally:
        torch.set_rng_state(outer)


class Evaluation:
    """One epoch's scores. All configurations see the same batches: shuffling draws from one position."""

    def __init__(
        self, net: nn.Module, evaluate: Evaluate, *, higher_is_better: bool, calibrate: Iterable[Any] | None
    ) -> None:
        if not callable(evaluate):
            raise EsperError(
                f"evaluate is {type(evaluate).__name__}; pass a function that returns the metric"
            )
        self._net = net
        self._evaluate = evaluate
        self._sign = 1.0 if higher_is_better else -1.0
        self._calibrate = calibrate if batch_norms(net) else None
        self._position = torch.get_rng_state()
        self.score = self._run()

    def contributions(self, slots: Sequence[GrowthSlot]) -> Iterator[tuple[float, float]]:
        """Per slot: the score minus that with its seed off, and the standard error."""
        if not slots:
            return
        with same_draws(self._position), kept_statistics(self._net):
            whole = self.score if self._calibrate is None else self._calibrated()
            for slot in slots:
                torch.set_rng_state(self._position)
                with slot.off():
                    yield whole.minus(self._calibrated())

    def _calibrated(self) -> Score:
        """The score with BatchNorm statistics of this very network, where batches were given for them."""
        if self._calibrate is not None:
            with same_draws(self._position), fresh_statistics(self._net):
                seen = 0
                for batch in self._calibrate:
                    seen += _feed(self._net, batch)
                    if seen >= CALIBRATION_SAMPLES:
                        break
                if not seen:
                    raise EsperError("calibrate= holds no batches; pass a loader of training batches")
        torch.set_rng_state(self._position)
        return self._run()

    def _run(self) -> Score:
        modes = [(module, module.training) for module in self._net.modules()]
        try:
            found = self._evaluate()
        finally:
            for module, mode in modes:
                module.training = mode
        return Score(tuple(self._sign * value for value in _numbers(found)))


def _numbers(found: Any) -> list[float]:
    if isinstance(found, Tensor):
        found = found.flatten()
    single = not hasattr(found, "__iter__")
    try:
        values = [
            float(value.detach() if isinstance(value, Tensor) else value)
            for value in ([found] if single else found)
        ]
    except (TypeError, ValueError):
        raise EsperError(f"evaluate returned {type(found).__name__} ({str(found)[:40]}); {_FORM}") from None
    if not values or isinstance(found, str | bytes | dict):
        raise EsperError(f"evaluate returned {str(found)[:40]!r}; {_FORM}")
    return values


def _feed(net: nn.Module, batch: Any) -> int:
    """Run a training batch, its targets left out where the forward does not take them; returns its size."""
    try:
        call(net, batch)
    except HostError:
        batch = batch[0]
        call(net, batch)
    first = next(iter(batch.values())) if isinstance(batch, dict) else batch
    while isinstance(first, list | tuple):
        first = first[0]
    return len(first)
