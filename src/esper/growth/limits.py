"""Settings of a user that can be told from values alone, and the sentences about those that cannot be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from numbers import Integral, Real
from typing import Any

from esper.leyline.errors import EsperError


def check_length(epochs: Any, budget: Any) -> None:
    """Of a training: one of them, and above 0."""
    if (epochs is None) == (budget is None):
        raise EsperError("say how long to train, once: epochs=… or budget=… in FLOPs")
    name, length = ("epochs", epochs) if budget is None else ("budget", budget)
    if not isinstance(length, Real) or not 0 < float(length) < math.inf:
        raise EsperError(f"{name} is {length!r}; it must be a number above 0")


def check_settings(higher_is_better: Any, **limits: Any) -> None:
    """Of growth: a direction of the metric, and limits that are numbers from 0 on or not given."""
    if not isinstance(higher_is_better, bool):
        raise EsperError(f"higher_is_better is {higher_is_better!r}; pass True, or False for a loss")
    for name, limit in limits.items():
        if limit is not None and not (isinstance(limit, Integral) and int(limit) >= 0):
            raise EsperError(f"{name} is {limit!r}; it must be a whole number, 0 or more")


def check_calibration(batches: Any) -> None:
    """Of growth: batches to loop over again and again. No loop is begun: a DataLoader would draw a number."""
    if batches is not None and (not isinstance(batches, Iterable) or isinstance(batches, Iterator)):
        raise EsperError(
            f"calibrate is a {type(batches).__name__}; pass a DataLoader or a list of training batches, which"
            " can be read every epoch"
        )


def check_alpha(alpha: Any) -> None:
    if not isinstance(alpha, Real) or not 0.0 <= float(alpha) <= 1.0:
        raise EsperError(f"alpha is {alpha!r}; it must be from 0 to 1")
