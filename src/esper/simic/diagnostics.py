"""Diagnostics of a policy update: fit of the critic, non-finite inputs, exploding probability ratios."""

import math
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from esper.leyline import HEAD_NAMES
from esper.leyline.thresholds import RATIO_RANGE

VARIANCE_FLOOR: Final = 1e-2
"""Lower limit of the variance of returns where it is a divisor, since constant returns have variance 0."""


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Return the critic's explained variance 1 − var(returns − values) / max(var(returns), 0.01)."""
    residual = (returns - values).var(correction=0)
    return float(1 - residual / returns.var(correction=0).clamp_min(VARIANCE_FLOOR))


def value_nrmse(values: Tensor, returns: Tensor) -> float:
    """Return the critic's RMS error divided by the standard deviation of the returns."""
    error = (returns - values).square().mean()
    return float((error / returns.var(correction=0).clamp_min(VARIANCE_FLOOR)).sqrt())


def correlation(a: Tensor, b: Tensor) -> float | None:
    """Return Pearson's correlation of the tensors ``a`` and ``b``; ``None`` if one of them is constant."""
    spread = a.std(correction=0) * b.std(correction=0)
    if spread < 1e-8:
        return None
    return float(((a - a.mean()) * (b - b.mean())).mean() / spread)


def first_non_finite(**rows: Tensor) -> str | None:
    """Describe the first non-finite number in named tensors ``[env, step]``; None if all are finite."""
    for name, values in rows.items():
        broken = ~torch.isfinite(values)
        if broken.any():
            env, step = broken.nonzero()[0].tolist()
            return f"{name} of environment {env} at step {step} is {values[env, step].item()}"
    return None


@dataclass(frozen=True, slots=True)
class RatioExplosionDiagnostic:
    """Decision with the most extreme ratio of new to old probability, and the head that changed most."""

    env: int
    step: int
    head: str
    action: int
    ratio: float
    old_log_prob: float
    new_log_prob: float

    @classmethod
    def of(cls, log_ratio: Tensor, log_probs: Tensor, old_log_probs: Tensor, actions: Tensor) -> Self | None:
        """Describe the decision with the largest |log ratio|; None if all ratios are in ``RATIO_RANGE``.

        Logarithms of probability ratios are compared, since the ratios can overflow to inf.

        Args:
            log_ratio: Log of new over old probability of the whole action, ``[env, step]``.
            log_probs: New log-probabilities ``[env, step, head]``.
            old_log_probs: Log-probabilities ``[env, step, head]`` at the time of the rollout.
            actions: Chosen values ``[env, step, head]``.
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
