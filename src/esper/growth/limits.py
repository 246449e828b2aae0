"""Numbers that a user may set, and the sentences about those that cannot be."""

from __future__ import annotations

import math
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
