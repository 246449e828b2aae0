"""Ablation of an environment step: its CPU time with each performance optimisation switched off in turn.

    python -m benchmarks.ablations [SEEDS]

The printed number is the CPU milliseconds of one environment step with SEEDS blended seeds per host, the
minimum of 20 measurements.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.bench_environment_step import Recorded
from benchmarks.timing import cpu_times
from esper.kasmina import configurations
from esper.kasmina.hosts.cnn import GlobalHead
from tests.tolaria.building import plant

ENVS, ITERATIONS = 2, 20


def _mean(head: GlobalHead, h: torch.Tensor) -> torch.Tensor:
    return head.linear(h.mean(dim=(2, 3)))


CHUNKS = [(configurations, "FEATURES_AT_ONCE", 2**17)]
WAYS: dict[str, list[tuple[Any, str, Any]]] = {
    "the head's gradient in the features' layout": [(GlobalHead, "forward", _mean)],
    "validation in larger chunks": CHUNKS,
}


def main() -> None:
    torch.set_num_threads(1)
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    recorded = Recorded.begin({slot: plant(slot) for slot in range(seeds)}, ENVS)
    for _ in range(seeds + 1):
        recorded.ours()
        recorded.theirs()

    def without(changes: list[tuple[Any, str, Any]]) -> Callable[[], None]:
        def step() -> None:
            with ExitStack() as stack:
                for owner, name, value in changes:
                    stack.enter_context(patch.object(owner, name, value))
                recorded.ours()

        return step

    calls: dict[str, Callable[[], object]] = {"as it is": without([])}
    calls |= {f"without: {name}": without(changes) for name, changes in WAYS.items()}
    calls["without all of these"] = without([change for changes in WAYS.values() for change in changes])
    calls["reference"] = recorded.theirs
    times = cpu_times(calls, repeats=1, iterations=ITERATIONS)
    for name, milliseconds in times.items():
        cost, more = milliseconds / ENVS, milliseconds / times["as it is"] - 1.0
        print(f"{name:60} {cost:6.1f} ms  {more:+6.1%}")


if __name__ == "__main__":
    main()
