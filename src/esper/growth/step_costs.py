"""Seconds that the candidates of a race add to a training step, measured on this machine."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch

from esper.growth.batch_training import Loss
from esper.growth.race_runners import SEED_RATE, Candidate, CostUnit, Runner

TIMED: Final = 5
"""Number of timed training steps per network; the smallest time counts, because other load on the machine can
only slow a step down."""
UNTIMED: Final = 1
"""Number of training steps per network before the timed ones."""
COARSE: Final = 1e-3
"""A clock of CPU time with ticks longer than this many seconds is replaced by wall-clock time."""


@dataclass
class StepCosts:
    """Unit in which candidates are weighed, and the measured costs of those that were weighed by seconds."""

    unit: CostUnit = "flops"
    measured: dict[str, float] = field(default_factory=dict)
    """Seconds that a candidate adds to a training step, as a fraction of a step of the network without it."""

    def weigh(self, candidates: Sequence[Candidate], control: Runner, batch: Any, loss: Loss) -> float:
        """Set the field ``cost`` of candidates to their measured costs, unless the unit is FLOPs.

        A network without trainable parameters has no training step to compare with, so the unit becomes
        FLOPs.

        Args:
            candidates: Candidates at the network of ``control``.
            control: Network without a new seed, and its optimiser.
            batch: Training batch.
            loss: Loss function.

        Returns:
            Compute of the measurements, in training steps of the network.
        """
        if not control.optimisers:
            self.unit = "flops"
        if self.unit == "flops":
            return 0.0
        bare, steps = copy.deepcopy(control), 0.0
        size = sum(p.numel() for p in control.net.parameters())
        for each in candidates:
            key = f"{each.blueprint} in {each.site.name} of {size} parameters"
            if key not in self.measured:
                seed = Runner.candidate(control.net, each.site, copy.deepcopy(each.graft), SEED_RATE)
                self.measured[key] = added_share(bare, seed.joined(control), batch, loss)
                steps += (UNTIMED + TIMED) * (2.0 + self.measured[key])
            each.cost = self.measured[key]
        return steps


def added_share(control: Runner, trial: Runner, batch: Any, loss: Loss) -> float:
    """Return the seconds that the seed of ``trial`` adds to a training step, as a fraction of a step without
    it; at least 0.

    The learning rate is zero in these steps, so no weight changes; moments and running statistics do, so both
    runners must be copies.

    Args:
        control: Network without the seed; it has an optimiser.
        trial: Copy of this network with the seed, as in ``Runner.joined``.
        batch: Training batch.
        loss: Loss function.
    """
    with trial.in_forward():
        steps = [partial(runner.update, batch, loss, 0.0) for runner in (control, trial)]
        bare, grown = least_seconds(steps, next(control.net.parameters()).device)
    return max(grown / bare - 1.0, 0.0)


def least_seconds(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Return the least seconds of each function over ``TIMED`` calls; the functions take turns.

    Args:
        calls: Functions to compare.
        device: Device that they use: on CUDA wall-clock time until the device is idle is measured, on all
            other devices CPU time of this process.
    """
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(UNTIMED + TIMED):
        for call, found in zip(calls, seconds, strict=True):
            began = _clock(device)
            call()
            found.append(_clock(device) - began)
    return [min(found[UNTIMED:]) for found in seconds]


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    is_coarse = time.get_clock_info("process_time").resolution > COARSE
    return time.perf_counter() if is_coarse else time.process_time()
