"""Timing of alternative functions, which take turns in one process, and benchmark results computed from their
CPU times.

A ``Figure`` is a named benchmark result, mostly a ratio of CPU times, because a ratio depends least on the
load of the machine. A benchmark fails if one of its results is above its upper limit or below its lower
limit.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from rich.console import Console
from rich.table import Table

ITERATIONS = 10
GEMM_SIZE = 1024
GEMM_FLOPS = 2 * GEMM_SIZE**3


class Figure(NamedTuple):
    """One result of a benchmark; ``holds`` states whether ``value`` is within the limit, and is None if there
    is no limit.
    """

    title: str
    value: float
    unit: str
    limit: str | None
    holds: bool | None
    note: str
    load: float
    """Load average of the machine during the measurement."""

    def __str__(self) -> str:
        bound = "" if self.limit is None else f" ({self.limit}{'' if self.holds else ': NOT HELD'})"
        note = f"; {self.note}" if self.note else ""
        return f"{self.title}: {self.value:.3g} {self.unit}{bound}{note}; load {self.load:.1f}"


FIGURES: list[Figure] = []
"""Results of all benchmarks that ran in this process, in order."""


def figure(
    title: str,
    value: float,
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    note: str = "",
) -> None:
    """Record and print one result of a benchmark.

    Args:
        title: What was measured, such as a function and its input.
        value: Measured number, in units of ``unit``.
        unit: Unit of ``value``, such as "ms" or "%".
        at_least: Least ``value`` with which the benchmark passes; None for no lower limit.
        at_most: Largest ``value`` with which the benchmark passes; None for no upper limit.
        note: Details that are printed behind the value, such as absolute times.

    Raises:
        AssertionError: ``value`` is below ``at_least`` or above ``at_most``.
    """
    limit, holds = None, None
    if at_least is not None:
        limit, holds = f"at least {at_least:g}", value >= at_least
    if at_most is not None:
        limit, holds = f"at most {at_most:g}", value <= at_most
    FIGURES.append(Figure(title, value, unit, limit, holds, note, os.getloadavg()[0]))
    print(f"\n{FIGURES[-1]}")
    assert holds is not False, FIGURES[-1]


def run(files: Sequence[Path], *, as_json: bool) -> bool:
    """Run benchmark files by pytest, print their results as a table or JSON; return whether all passed."""
    selected = ["-o", "python_files=bench_*.py", "-o", "python_functions=bench_*"]
    plain = ["-p", "no:xdist", "-p", "no:cacheprovider", f"--rootdir={Path(__file__).parents[1]}"]
    shown = ["--capture=no", "--no-header", "--tb=line", "--quiet"]
    with redirect_stdout(StringIO()) if as_json else nullcontext():
        failed = bool(pytest.main([*map(str, files), *shown, *selected, *plain]))
    if as_json:
        print(json.dumps([result._asdict() for result in FIGURES], indent=1))
        return not failed
    table = Table("figure", "value", "", "limit", "")
    for result in FIGURES:
        held = {True: "holds", False: "NOT HELD", None: ""}[result.holds]
        table.add_row(result.title, f"{result.value:.3g}", result.unit, result.limit or "", held)
    Console().print(table)
    return not failed


def cpu_times(
    calls: Mapping[str, Callable[[], object]], *, repeats: int, iterations: int = ITERATIONS
) -> dict[str, float]:
    """Return CPU milliseconds per call of each alternative function, the minimum over ``iterations``
    measurements.

    Every measurement calls each alternative function ``repeats`` times, so that other load on the machine
    slows all alternatives.
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


def ratio(
    title: str, times: Mapping[str, float], over: str, under: str, *, at_most: float | None = None
) -> None:
    """Record the ratio of two CPU times, ``times[over] / times[under]``, as a benchmark result."""
    note = f"{over} {times[over]:.2f} ms, {under} {times[under]:.2f} ms"
    figure(f"{title}: {over}", times[over] / times[under], f"× {under}", at_most=at_most, note=note)


@cache
def _matrices() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(GEMM_SIZE, GEMM_SIZE) for _ in range(3))


def gemm() -> None:
    """Multiply two matrices that are large enough to reach the peak rate of one core."""
    left, right, product = _matrices()
    torch.mm(left, right, out=product)


def gflops(flops: float, milliseconds: float) -> float:
    return flops / milliseconds / 1e6
