"""Race between candidate seeds and the network without a seed, in heats, within a limit of time or
compute."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from esper.growth.batch_training import (
    Loss,
    check_loader,
    endless,
    first_batches,
    loss_of,
    size_of,
    untouched_streams,
)
from esper.growth.diagnosis_report import CandidateRow, Diagnosis, decide
from esper.growth.race_runners import (
    SEED_RATE,
    Blueprints,
    Candidate,
    Limit,
    Paired,
    Probe,
    Runner,
    frozen,
    one_per_place_first,
    score,
    scored_together,
    share_of_rate,
    spread,
)
from esper.growth.step_costs import StepCosts
from esper.kasmina.compute import flop_counter
from esper.kasmina.contributions import evaluating
from esper.leyline import DataError


class Heat(NamedTuple):
    """Heat of a race: one training of some candidates on the same batches, followed by a comparison of their
    losses."""

    steps: int
    """Number of batches that every candidate trains on in this heat of a race."""
    size: int
    """Largest number of candidates in this heat of a race."""
    share: float
    """Largest fraction of the race's remaining time or compute that this heat may use."""


@dataclass(frozen=True, slots=True)
class Course:
    """Settings of a race: its heats, and whether it is part of a training."""

    heats: tuple[Heat, ...]
    """Heats of the race; in the last heat the network trains jointly with the candidate's seed."""
    in_training: bool = False
    """Whether the race is part of a training that continues; the control then trains on as many batches as a
    candidate. If a race inside a training has more candidates than its first heat accepts, those with the
    best first-order (gradient) scores start; if scores cost too much, candidates spread over the network."""


HOST_RATES: Final = (3e-4, 2e-3, 8e-3)
"""Learning rates of the controls (networks without a seed) if no optimiser is given; only the best control
stays after the first heat."""
RACE: Final = Course((Heat(24, 4, 0.5), Heat(200, 1, 1.0)), in_training=True)
"""Settings of a race inside ``esper.grow``: two heats."""
RACED_BLUEPRINTS: Final[Blueprints] = {
    "feature_map": ("stack", "widen", "conv_light"),
    "volume": ("stack", "conv_light"),
    "tokens": ("stack", "widen", "mlp_small", "attention"),
    "features": ("stack", "widen", "mlp_small"),
}
"""Blueprints of the candidates in a race inside ``esper.grow``, by topology."""
VALIDATION_SAMPLES: Final = 2048
"""Largest number of validation samples in a race."""
MEASURING: Final = 0.02
"""Largest fraction of a race's limit of time or compute that one forward pass over the validation samples may
use."""
LEAST_STEPS: Final = 8
"""Smallest number of training batches in a heat of a race; a shorter heat is not run."""
FIRST_ORDER_BATCHES: Final = 6
SCORING: Final = 0.1
"""Largest fraction of a race's limit of time or compute for the first-order (gradient) scores, in a race
inside ``esper.grow``."""
PARTS: Final = 32
"""Number of validation chunks; the networks in a race are compared by their paired losses on the chunks."""
MOST_CONTROL_STEPS: Final = 3.0
"""Largest number of training steps of the control per training step of a candidate."""


class Race:
    """State of one race: candidates, controls, measurements, and the limit of time or compute."""

    def __init__(
        self,
        net: nn.Module,
        optimizer: Optimizer | None,
        loss: Loss,
        held_out: list[Any],
        batches: Iterator[Any],
        limit: Limit,
        course: Course,
        costs: StepCosts,
    ) -> None:
        self.name, self.loss, self.batches, self.limit = type(net).__name__, loss, batches, limit
        self.course, self.costs = course, costs
        self.host = frozen(net)
        self.training = [next(batches) for _ in range(FIRST_ORDER_BATCHES)]
        self.probe = Probe.of(held_out, loss, PARTS)
        self.host_flops = self._count_host()
        """Forward FLOPs of the network for one sample."""
        limit.set_step(3 * self.host_flops * size_of(self.training[0]))
        self.probe.shorten(MEASURING * limit.left / self.host_flops)
        with limit.charged(self._measuring_flops(0)):
            self.base = self.probe.losses(self.host)
        if not bool(torch.isfinite(self.base).all()):
            raise DataError(
                "the loss of the network on val_loader is not a finite number; diagnose a network that works,"
                " on data without NaN"
            )
        trained = Probe.of(self.training, loss, len(self.training))
        self.train_loss = trained.mean(trained.losses(self.host))
        self.candidates: list[Candidate] = []
        """Candidates that are still in the race, best first."""
        self.out: list[Candidate] = []
        if optimizer is None:
            self.controls = [Runner.control(net, rate) for rate in HOST_RATES]
        else:
            self.controls = [Runner.continued(net, optimizer)]
        self.control: Paired | None = None
        self.was_cut_short = False
        """Whether a heat was left out or shortened by the limit."""

    def _count_host(self) -> float:
        part, size = self.probe.parts[0], size_of(self.probe.parts[0])
        with torch.no_grad(), evaluating(self.host):
            with flop_counter() as counter:
                loss_of(self.host, part, self.loss)
            flops = max(counter.get_total_flops(), size)
            with self.limit.charged(flops):
                loss_of(self.host, part, self.loss)
        return flops / size

    def _measuring_flops(self, seed_cost: float) -> float:
        return self.probe.samples * (self.host_flops + seed_cost)

    def run(self) -> bool:
        """Choose the candidates of the first heat and run all heats; return False if time or compute of the
        race ran out.
        """
        size = self._first_size()
        if not self.course.in_training:
            self.score_first_order()
        elif len(self.candidates) > size:
            if self._scoring_flops() <= SCORING * self.limit.left:
                self.score_first_order()
                self.candidates = one_per_place_first(self.candidates)[:size]
            else:
                self.candidates = spread(self.candidates, size)
        starting = one_per_place_first(self.candidates)[: self.course.heats[0].size]
        steps = self.costs.weigh(starting, self.controls[0], self.training[0], self.loss)
        self.limit.spent += steps * 3 * self.host_flops * size_of(self.training[0])
        for number, each in enumerate(self.course.heats):
            if number == len(self.course.heats) - 1:
                self.join_control(each.size)
            if not self.run_heat(each):
                self.was_cut_short = True
                return False
        return True

    def _first_size(self) -> int:
        """Return the number of candidates in the first heat: as many as can train on ``LEAST_STEPS`` batches,
        but at least one."""
        heat, samples = self.course.heats[0], LEAST_STEPS * size_of(self.training[0])
        flops = self.host_flops * max(each.cost for each in self.candidates)
        control = samples * 3 * self.host_flops + self._measuring_flops(0)
        each = samples * (2 * self.host_flops + 3 * flops) + self._measuring_flops(flops)
        return max(1, min(heat.size, int((heat.share * self.limit.left - control) / each)))

    def score_first_order(self) -> None:
        """Score every candidate by the slope of the validation loss along the training gradient of its new
        seed, and sort the candidates by this score."""
        with evaluating(self.host), self.limit.charged(self._scoring_flops()):
            score(self.host, self.candidates, [self.training, self._some_parts()], self.loss)
        self.candidates.sort(key=lambda each: -each.first_order)

    def _some_parts(self) -> list[Any]:
        return self.probe.parts[:: max(1, len(self.probe.parts) // FIRST_ORDER_BATCHES)]

    def _scoring_flops(self) -> float:
        samples = sum(map(size_of, [*self.training, *self._some_parts()]))
        groups = len(scored_together(self.candidates))
        return samples * self.host_flops * (2 * groups + 3 * sum(each.cost for each in self.candidates))

    def run_heat(self, planned: Heat) -> bool:
        """Train and measure the best candidates in one heat of a race; return False if too little time or
        compute is left."""
        running = one_per_place_first(self.candidates)[: planned.size]
        runners = [self._runner_of(each) for each in running]
        control_steps = self._control_steps(running, planned.steps)
        measuring = sum(self._measuring_flops(each.seed_cost) for each in [*runners, *self.controls])
        per_step = size_of(self.training[0]) * (
            sum(each.step_flops(self.host_flops, is_frozen=each.net is self.host) for each in runners)
            + control_steps * sum(each.step_flops(self.host_flops, is_frozen=False) for each in self.controls)
        )
        steps = int(min(planned.steps, (planned.share * self.limit.left - measuring) / per_step))
        self.was_cut_short |= steps < planned.steps
        if steps < LEAST_STEPS:
            return False
        started = self.limit.elapsed
        made = self.train(runners, steps, control_steps, measuring)
        self.limit.charge(per_step * max(made, 1), self.limit.elapsed - started)
        with self.limit.charged(measuring):
            self._measure(running, [*runners, *self.controls])
        return made == steps

    def train(self, runners: Sequence[Runner], steps: int, control_steps: float, reserve: float) -> int:
        """Train candidates on ``steps`` batches, and controls on ``control_steps`` batches per batch of the
        candidates.

        Returns:
            Number of batches that the candidates trained on; below ``steps`` if less than ``reserve`` FLOPs
            were left.
        """
        owed = 0.0
        for step in range(steps):
            if self.limit.left < reserve:
                return step
            share = share_of_rate(step, steps)
            batch = next(self.batches)
            for runner in runners:
                runner.step(batch, self.loss, share)
            owed += control_steps
            while owed >= 1.0:
                for runner in self.controls:
                    runner.step(batch, self.loss, share)
                owed -= 1.0
                if owed >= 1.0:
                    batch = next(self.batches)
        return steps

    def join_control(self, size: int) -> None:
        """Move the seeds of the best candidates into copies of the control, unless the loss of the control is
        not finite."""
        if self.controls[0].has_diverged:
            return
        for each in one_per_place_first(self.candidates)[:size]:
            each.runner = self._runner_of(each).joined(self.controls[0])

    def _runner_of(self, candidate: Candidate) -> Runner:
        """Return the runner (network in training) of a candidate; a new runner has the seed in the frozen
        network."""
        if candidate.runner is None:
            graft = copy.deepcopy(candidate.graft)
            cost = candidate.cost * self.host_flops
            candidate.runner = Runner.candidate(self.host, candidate.site, graft, SEED_RATE, cost)
        return candidate.runner

    def _control_steps(self, running: Sequence[Candidate], steps: int) -> float:
        """Return the number of training steps of the control per training step of a candidate.

        In the first heat of a race the control makes as many steps as a candidate. In later heats the control
        makes more steps, so that over the whole race it uses as much compute as the most expensive candidate.
        """
        made = max(self._runner_of(each).steps for each in running)
        if self.course.in_training or not made:
            return 1.0
        whole = (1.0 + max(each.cost for each in running)) * (made + steps)
        return min(MOST_CONTROL_STEPS, (whole - self.controls[0].steps) / steps)

    def _measure(self, running: Sequence[Candidate], runners: Sequence[Runner]) -> None:
        """Measure all networks of the race, keep only the best control, and drop the candidates that were not
        trained in this heat.
        """
        for runner in runners:
            runner.measure(self.probe)
        self.controls = [min(self.controls, key=self._loss)]
        control = self.controls[0].losses
        assert control is not None
        self.control = None if self.controls[0].has_diverged else self.probe.paired(control, self.base)
        # In a diagnosis whose control does not lower the loss, candidates are compared with the network
        # before the race.
        helped = self.control is not None and (self.control.mean < 0 or self.course.in_training)
        reference = control if helped else self.base
        for each in running:
            losses = self._runner_of(each).losses
            assert losses is not None
            each.change = self.probe.paired(losses, self.base)
            each.beyond = self.probe.paired(losses, reference)
        self.out += [each for each in self.candidates if each not in running]
        self.candidates = sorted(running, key=lambda each: self._loss(self._runner_of(each)))

    def _loss(self, runner: Runner) -> float:
        assert runner.losses is not None
        return math.inf if runner.has_diverged else self.probe.mean(runner.losses)

    def diagnosis(self) -> Diagnosis:
        """Return a diagnosis from the measurements of the race."""
        rows = [_row_of(each) for each in [*self.candidates, *self.out]]
        rows.sort(key=lambda row: (-row.steps, math.inf if row.change is None else row.change.mean))
        val_loss = self.probe.mean(self.base)
        verdict, best, reason = decide(val_loss, rows, self.control, self.controls[0].steps)
        return Diagnosis(
            self.name,
            verdict,
            best.place if best else None,
            best.blueprint if best else None,
            reason,
            val_loss,
            self.train_loss,
            rows,
            self.control,
            self.controls[0].steps,
            self.limit.elapsed,
            self.limit.spent,
            cost=self.costs.unit,
            cut_short=self.was_cut_short,
            probe=self.probe,
            base=self.base,
        )


def _row_of(candidate: Candidate) -> CandidateRow:
    """Return a candidate as a row of the diagnosis table."""
    seed = (candidate.site.name, candidate.blueprint, candidate.parameters, candidate.flops)
    found = (candidate.first_order, candidate.change, candidate.beyond)
    if candidate.runner is None:
        return CandidateRow(*seed, *found)
    return CandidateRow(*seed, *found, candidate.runner.steps, candidate.cost)


@contextmanager
def race_of(
    net: nn.Module,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any],
    loss: Loss,
    optimizer: Optimizer | None,
    limit: Limit,
    course: Course,
    costs: StepCosts,
) -> Iterator[Race]:
    """Yield a race on the data of the two loaders; random states and loaders are restored on exit.

    Args:
        net: Network, which is not changed.
        train_loader: Training batches.
        val_loader: Validation batches.
        loss: Loss function.
        optimizer: Optimiser whose copy trains the control; None for Adam at several learning rates.
        limit: Limit of the race.
        course: Heats of the race.
        costs: Unit in which candidates are weighed, and costs measured in earlier races.
    """
    device = next((tensor.device for tensor in net.parameters()), torch.device("cpu"))
    with untouched_streams(train_loader, val_loader), torch.enable_grad():
        torch.manual_seed(0)
        check_loader(train_loader, "train_loader")
        check_loader(val_loader, "val_loader")
        held_out = first_batches(val_loader, device, "val_loader", VALIDATION_SAMPLES)
        batches = endless(train_loader, device, "train_loader")
        yield Race(net, optimizer, loss, held_out, batches, limit, course, costs)
