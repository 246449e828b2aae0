"""Learning-rate schedules over an episode or a training."""

import math
from typing import Final, Literal

ScheduleKind = Literal["cosine", "wsd"]
DECAY_SHARE: Final = 0.2
"""Last share of an episode in which a warmup-stable-decay schedule falls to zero."""


def cosine_rate(base: float, progress: float) -> float:
    """Return a learning rate that falls from ``base`` at progress 0 to zero at progress 1, along a half
    cosine.
    """
    return base * 0.5 * (1.0 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))


def wsd_factor(progress: float, minibatch: int, warmup: int) -> float:
    """Return the warmup-stable-decay factor (Hu et al. 2024): it rises to 1 over ``warmup`` minibatches,
    stays at 1, and falls to 0 at the end.

    The learning rate decays linearly over the last ``DECAY_SHARE`` of the episode.
    """
    return min(1.0, (minibatch + 1) / (warmup + 1), max((1.0 - progress) / DECAY_SHARE, 0.0))
