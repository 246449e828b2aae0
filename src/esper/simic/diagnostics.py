"""Numbers about an update: fit of the critic, spread of the ratio, and who is to blame when it explodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from esper.leyline import HEAD_NAMES
from esper.leyline.thresholds import RATIO_RANGE

VARIANCE_FLOOR: Final = 1e-2
"""Returns that hardly vary cannot be explained better than noise: their variance counts as this."""


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 − var(returns − values) / max(var(returns), floor)."""
    residual = (returns - values).var(correction=0)
    return float(1 - residual / returns.var(correction=0).clamp_min(VARIANCE_FLOOR))


def value_nrmse(values: Tensor, returns: Tensor) -> float:
    """Error of the values over the spread of the returns, floored like the explained variance."""
    error = (returns - values).square().mean()
    return float((error / returns.var(correction=0).clamp_min(VARIANCE_FLOOR)).sqrt())


def correlation(a: Tensor, b: Tensor) -> float | None:
    """Pearson's correlation; ``None`` where one of them does not vary."""
    spread = a.std(correction=0) * b.std(correction=0)
    if spread < 1e-8:
        return None
    return float(((a - a.mean()) * (b - b.mean())).mean() / spread)


def first_non_finite(**rows: Tensor) -> str | None:
    """Where the first number that is not finite stands, in words; every tensor is ``[env, step]``."""
    for name, values in rows.items():
        broken = ~torch.isfinite(values)
        if broken.any():
            env, step = broken.nonzero()[0].tolist()
            return f"{name} of environment {env} at step {step} is {values[env, step].item()}"
    return None


@dataclass(frozen=True, slots=True)
class RatioExplosionDiagnostic:
    """The row whose probability changed most, and the head that changed it."""

    env: int
    step: int
    head: str
    action: int
    ratio: float
    old_log_prob: float
    new_log_prob: float

    @classmethod
    def of(
        cls, log_ratio: Tensor, log_probs: Tensor, old_log_probs: Tensor, actions: Tensor
    ) -> RatioExplosionDiagnostic | None:
        """The worst row of ``log_ratio [env, step]`` if its ratio left the allowed range.

        By logarithms: ratios overflow long before them, and then all look alike.
        """
        low, high = map(math.log, RATIO_RANGE)
        if bool(((log_ratio <= high) & (log_ratio >= low)).all()):
            return None
        distance = log_ratio.abs().nan_to_num(nan=torch.inf)
        env, step = divmod(int(distance.argmax()), log_ratio.shape[1])
        change = (log_probs - old_log_probs)[env, step].abs().nan_to_num(nan=torch.inf)
        head = int(change.argmax())
        return cls(
            env=env,
            step=step,
            head=HEAD_NAMES[head],
            action=int(actions[env, step, head]),
            ratio=float(log_ratio[env, step].exp()),
            old_log_prob=float(old_log_probs[env, step, head]),
            new_log_prob=float(log_probs[env, step, head]),
        )
