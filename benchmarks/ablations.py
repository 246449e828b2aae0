"""What each way of making an environment's step faster buys: the step without it, all taking turns.

    python -m benchmarks.ablations [SEEDS]

CPU milliseconds per environment-step with so many blended seeds, the least of some iterations.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.bench_environment_step import Recorded
from benchmarks.measuring import cpu_times
from esper.kasmina import native, slot
from esper.kasmina.hosts.cnn import GlobalHead
from esper.kasmina.slot import SeedSlot
from esper.tolaria import precision, switching
from tests.tolaria.building import plant

ENVS, ITERATIONS = 2, 20


def _mean(head: GlobalHead, h: torch.Tensor) -> torch.Tensor:
    return head.linear(h.mean(dim=(2, 3)))


def _added(slot: SeedSlot, h: torch.Tensor, alpha: torch.Tensor, ambient: bool) -> torch.Tensor:
    return torch.addcmul(h, alpha, slot._change(h, ambient))


def _never(*_: object) -> bool:
    return False


def _step_each(optimisers: Sequence[torch.optim.Optimizer]) -> None:
    for optimiser in optimisers:
        optimiser.step()


CHUNKS = [(switching, "FEATURES_AT_ONCE", 2**17)]
WAYS: dict[str, list[tuple[Any, str, Any]]] = {
    "kernels of our own": [(native, "takes", _never), (slot, "takes", _never)],
    "a light seed by one kernel": [(SeedSlot, "_blended", _added)],
    "the head's gradient in the features' layout": [(GlobalHead, "forward", _mean)],
    "validation in larger chunks": CHUNKS,
    "host and seeds stepped together": [(precision, "step_together", _step_each)],
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
