"""Values that change over a training run, as functions of its progress."""

from __future__ import annotations


def linear(start: float, end: float, progress: float) -> float:
    """``start`` at progress 0, ``end`` from progress 1 on."""
    share = min(max(progress, 0.0), 1.0)
    return start + (end - start) * share
