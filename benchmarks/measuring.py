"""CPU time of alternatives in one process, taking turns: ratios that a busy machine changes least."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import cache

import torch

ITERATIONS = 10
GEMM_SIZE = 1024
GEMM_FLOPS = 2 * GEMM_SIZE**3


@cache
def _matrices() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(GEMM_SIZE, GEMM_SIZE) for _ in range(3))


def gemm() -> None:
    """One matrix product that is large enough to run at the machine's rate."""
    left, right, product = _matrices()
    torch.mm(left, right, out=product)


def cpu_times(
    calls: Mapping[str, Callable[[], object]], *, repeats: int, iterations: int = ITERATIONS
) -> dict[str, float]:
    """Milliseconds per call of each alternative, the least of ``iterations`` of ``repeats`` calls.

    Every iteration runs all alternatives, so that whatever slows the machine down slows all of them.
    """
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    for _ in range(iterations):
        for name, call in calls.items():
            began = time.process_time()
            for _ in range(repeats):
                call()
            best[name] = min(best[name], 1000.0 * (time.process_time() - began) / repeats)
    return best


def ratio(title: str, times: Mapping[str, float], over: str, under: str) -> float:
    """How many times as long ``over`` takes as ``under``, printed with both times."""
    value = times[over] / times[under]
    print(f"\n{title}: {over} {times[over]:.2f} ms, {under} {times[under]:.2f} ms, ratio {value:.2f}")
    return value


def figure(title: str, text: str) -> None:
    """Print one result with the machine's load, which says how far to trust it."""
    print(f"\n{title}: {text}; load {os.getloadavg()[0]:.1f}")
