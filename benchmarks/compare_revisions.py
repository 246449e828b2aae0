"""CPU time of environment steps and of training steps of a growing network, in this checkout relative to
another checkout.

    python -m benchmarks.compare_revisions PATH_TO_OTHER_CHECKOUT [REPEATS]

Two worker processes, one per checkout, take turns on the same work with one torch thread; the time of a
benchmark case is the minimum over its repeats. The C kernels of older revisions are switched off (CC=none).
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
REPEATS = 15
CASES = ("environment, no seeds", "environment, two seeds", "growth, empty slots", "growth, two seeds")


def environment(seeds: int) -> Callable[[], None]:
    """Return a function that runs three steps of four environments with 32×32 images and the given number of
    blended seeds.
    """
    from dataclasses import replace  # noqa: PLC0415

    from esper.leyline import LifecycleRules  # noqa: PLC0415
    from esper.tolaria.data import split_images  # noqa: PLC0415
    from esper.tolaria.tasks import task_named  # noqa: PLC0415
    from esper.tolaria.tasks.spec import InstanceDistribution  # noqa: PLC0415
    from esper.tolaria.vector import SerialVector  # noqa: PLC0415

    stream = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (1152,), generator=stream)
    images = torch.randn(1152, 3, 32, 32, generator=stream)
    task = replace(
        task_named("digits"),
        name="pictures",
        input_shape=(3, 32, 32),
        load=lambda generator: split_images(images, labels, validation=64, test=64, generator=generator),
        instances=InstanceDistribution(widths=((8, 16, 32),), kernels=(3,)),
        horizon=4000,
        batches_per_epoch=4,
        rules=LifecycleRules(min_training_epochs=0, enters_at_once=True),
    )
    vector = SerialVector(task, rng_seed=0, env_indices=range(4))
    vector.reset()
    wait = np.concatenate([vector.action_space.action("wait")] * 4)
    for slot in ("r0c0", "r0c1")[:seeds]:
        planted = vector.action_space.action("germinate", slot=slot, blueprint="conv_light")
        vector.step(np.concatenate([planted] * 4))

    def work() -> None:
        for _ in range(3):
            vector.step(wait)

    return work


class WideBlock(nn.Module):
    """Residual block of two 3×3 convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(torch.relu(x))))


def growing(seeds: int) -> Callable[[], None]:
    """Return a function that runs 20 training steps of a user's residual network with two slots and the given
    number of seeds.
    """
    import esper  # noqa: PLC0415

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        WideBlock(),
        WideBlock(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    x, y = torch.randn(48, 3, 16, 16), torch.randint(10, (48,))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    known: dict[str, Any] = {"sample": x, "slots": ["1", "2"], "controller": None}
    if "mode" in signature(esper.Growth).parameters:  # Earlier revisions have another argument.
        known["mode"] = "min"
    growth = esper.Growth(net, optimizer, **known)
    for slot in ("1", "2")[:seeds]:
        growth.germinate(slot, "conv_light")

    def work() -> None:
        for _ in range(20):
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return work


def serve() -> None:
    """Execute each benchmark case whose name is read from standard input, and print the CPU seconds of the
    case.
    """
    torch.set_num_threads(1)
    works = {
        name: make(seeds)
        for name, make, seeds in zip(
            CASES, (environment, environment, growing, growing), (0, 2, 0, 2), strict=True
        )
    }
    for work in works.values():
        work()
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.process_time()
        works[line.strip()]()
        print(time.process_time() - began, flush=True)


def main(other: str, repeats: int) -> None:
    """Print the ratio of this checkout's CPU time to that of the other checkout, by benchmark case."""
    workers = []
    for checkout in (ROOT, Path(other).resolve()):
        environ = {**os.environ, "PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{ROOT}", "CC": "none"}
        command = [sys.executable, "-m", "benchmarks.compare_revisions", "--worker"]
        pipe = subprocess.PIPE
        workers.append(subprocess.Popen(command, cwd=ROOT, env=environ, text=True, stdin=pipe, stdout=pipe))
    least: dict[tuple[str, int], float] = {}
    for worker in workers:
        assert worker.stdout is not None
        worker.stdout.readline()
    for _ in range(repeats):
        for case in CASES:
            for number, worker in enumerate(workers):
                assert worker.stdin is not None
                assert worker.stdout is not None
                worker.stdin.write(f"{case}\n")
                worker.stdin.flush()
                taken = float(worker.stdout.readline())
                least[case, number] = min(taken, least.get((case, number), taken))
    for worker in workers:
        worker.communicate()
    for case in CASES:
        here, there = least[case, 0], least[case, 1]
        print(f"{case}: {1000 * here:.1f} ms against {1000 * there:.1f} ms, ratio {here / there:.3f}")


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        serve()
    else:
        main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else REPEATS)
