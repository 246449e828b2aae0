"""Is a network too small, and where? Candidates race behind it, beside the same network trained longer.

One backward pass scores every blueprint at every place; the best of them learn behind the frozen network in
heats of growing length, from each of which the better half goes on. Beside them a copy of the network trains
on, with at least the same compute. Nothing of the user's is changed: the race runs on copies, and random
states and loaders are put back.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from esper.growth.adding import SAMPLES
from esper.growth.diagnosis import Diagnosis, Row, decide
from esper.growth.race import Paired, Probe, Runner, evaluating, frozen, grafted, heat
from esper.growth.sites import Site, find_sites
from esper.growth.slot import Graft, build_graft
from esper.growth.surroundings import unwrapped
from esper.growth.user_batches import (
    Loss,
    check_loader,
    endless,
    first_batches,
    inputs_of,
    loss_of,
    size_of,
    untouched_streams,
)
from esper.kasmina import birth
from esper.kasmina.blueprints import Topology, blueprint_named
from esper.leyline.errors import BlueprintError, DataError
from esper.leyline.factored_actions import Style
from esper.tolaria.flops import count_part, flop_counter

BLUEPRINTS: Final[dict[Topology, tuple[str, ...]]] = {
    "feature_map": ("conv_light", "conv_heavy"),
    "tokens": ("mlp_small", "attention"),
    "features": ("lora", "mlp_small"),
}
"""Tried where none is named: a cheap one and one with more in it."""
SEED_RATES: Final = (2e-3, 1e-2)
HOST_RATES: Final = (3e-4, 2e-3, 8e-3)
"""Of Adam, side by side in the first heat; the better one goes on."""
HEATS: Final = ((30, 8, 1 / 3), (60, 4, 1 / 2), (120, 2, 1.0))
"""Batches of each heat, how many candidates run in it, and the share it may take of the time left.

In the last one the network learns with them, if training it longer has helped so far."""
MEASURING: Final = 0.02
"""Share of the time that one measurement may take."""
LEAST_STEPS: Final = 8
"""A heat of fewer batches says nothing."""
FIRST_ORDER_BATCHES: Final = 6
VALIDATION_SAMPLES: Final = 1024
PARTS: Final = 32
"""Of the validation data, whose losses are compared in pairs."""
MOST_CONTROL_STEPS: Final = 3.0
"""A control makes at most so many steps for one of a candidate, however much that costs."""


@dataclass
class Clock:
    """The time given; it holds up to one batch of one runner."""

    seconds: float
    started: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.seconds - self.spent

    @property
    def spent(self) -> float:
        return time.monotonic() - self.started


@dataclass
class Candidate:
    """A blueprint at a site, what it costs, and how it did when it last ran."""

    site: Site
    blueprint: str
    graft: Graft
    flops: int
    first_order: float = 0.0
    runners: list[Runner] = field(default_factory=list)
    """One for each rate in the first heat, then the better one."""
    change: Paired | None = None
    beyond: Paired | None = None

    def row(self) -> Row:
        """For the table."""
        parameters = sum(p.numel() for p in self.graft.parameters())
        steps = max((runner.steps for runner in self.runners), default=0)
        return Row(
            self.site.name,
            self.blueprint,
            parameters,
            self.flops,
            self.first_order,
            self.change,
            self.beyond,
            steps,
        )


def diagnose(  # noqa: PLR0913  what a user may say, by name
    net: nn.Module,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any],
    *,
    loss: Loss,
    minutes: float = 2.0,
    slots: str | Sequence[str] = "auto",
    blueprints: Sequence[str] | None = None,
    sample: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Diagnosis:
    """Say whether a seed at some place would lower the validation loss, and whether training longer would.

    Batches ``(inputs…, target)`` are used as ``loss(net(*inputs), target)``, all others as
    ``loss(net, batch)``. ``slots`` and ``blueprints`` name the places and kinds of seeds to try;
    ``sample`` is what the network is called with, where a batch is not that. With
    ``optimizer`` the control trains on with a copy of it, at the rate it began with; else with Adam at the
    best of three rates.
    """
    clock = Clock(60.0 * minutes)
    net = unwrapped(net)
    device = next((tensor.device for tensor in net.parameters()), torch.device("cpu"))
    with untouched_streams(train_loader, val_loader), torch.enable_grad():
        torch.manual_seed(0)
        check_loader(train_loader, "train_loader")
        check_loader(val_loader, "val_loader")
        held_out = first_batches(val_loader, device, "val_loader", VALIDATION_SAMPLES)
        batches = endless(train_loader, device, "train_loader")
        race = Race(net, optimizer, loss, held_out, batches, clock)
        SAMPLES[net] = inputs_of(race.training[0]) if sample is None else sample
        race.find_candidates(slots, blueprints, SAMPLES[net])
        race.score_first_order()
        for number, (steps, size, share) in enumerate(HEATS):
            if number == len(HEATS) - 1:
                race.join_control(size)
            if not race.run_heat(steps, size, share):
                break
        return race.diagnosis()


class Race:
    """The state of one diagnosis."""

    def __init__(
        self,
        net: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        loss: Loss,
        held_out: list[Any],
        batches: Iterator[Any],
        clock: Clock,
    ) -> None:
        self.name, self.loss, self.batches, self.clock = type(net).__name__, loss, batches, clock
        self.host = frozen(net)
        self.training = [next(batches) for _ in range(FIRST_ORDER_BATCHES)]
        self.probe = Probe.of(held_out, loss, PARTS)
        self.probe.shorten(self.host, MEASURING * clock.seconds)
        started = time.monotonic()
        self.base = self.probe.losses(self.host)
        self.seconds_to_measure = time.monotonic() - started
        if not bool(torch.isfinite(self.base).all()):
            raise DataError(
                "the loss of the network on val_loader is not a finite number; diagnose a network that works,"
                " on data without NaN"
            )
        trained = Probe.of(self.training, loss, len(self.training))
        self.train_loss = trained.mean(trained.losses(self.host))
        with flop_counter() as counter, torch.no_grad(), evaluating(self.host):
            loss_of(self.host, self.probe.parts[0], loss)
        self.host_flops = counter.get_total_flops() / size_of(self.probe.parts[0])
        self.candidates: list[Candidate] = []
        """Those still in the race, best first."""
        self.out: list[Candidate] = []
        self.controls = [Runner.control(net, rate) for rate in HOST_RATES]
        if optimizer is not None:
            self.controls = [Runner.continued(net, optimizer)]
        self.control: Paired | None = None
        self.seconds_per_step = 0.0

    def find_candidates(
        self, slots: str | Sequence[str], blueprints: Sequence[str] | None, sample: Any
    ) -> None:
        """A seed of every blueprint at every site that takes it."""
        like = next((p for p in self.host.parameters() if p.is_floating_point()), torch.empty(0))
        for site in find_sites(self.host, slots, sample):
            for name in BLUEPRINTS[site.topology] if blueprints is None else blueprints:
                spec = blueprint_named(name, site.topology)
                if spec.copies:
                    raise BlueprintError(
                        f"blueprint '{name}' copies a block and does not start at zero, which a diagnosis"
                        " measures from; name others"
                    )
                if birth.takes(spec, site.width, copyable=False):
                    graft = build_graft(site, spec, Style.LINEAR_ADD, self.host)
                    flops = count_part(graft, site.shape[1:]).forward
                    self.candidates.append(Candidate(site, name, graft.to(like), flops))
        if not self.candidates:
            raise BlueprintError("none of the blueprints fits a place; name others with blueprints=[…]")

    def score_first_order(self) -> None:
        """The slope of the validation loss along every candidate's training gradient, where it starts.

        All candidates are in the forward at once, since each adds exactly zero, so one backward pass gives
        the gradients g (training) of all, another v (validation). The score is <g, v> / |g|.
        """
        every = max(1, len(self.probe.parts) // FIRST_ORDER_BATCHES)
        with evaluating(self.host), ExitStack() as stack:
            for each in self.candidates:
                stack.enter_context(grafted(self.host, each.site, each.graft))
            started = time.monotonic()
            train = self._gradients(self.training)
            self.seconds_per_step = (time.monotonic() - started) / len(self.training)
            held_out = self._gradients(self.probe.parts[::every])
        for each, g, v in zip(self.candidates, train, held_out, strict=True):
            each.first_order = float(g @ v / g.norm()) if bool(g.norm() > 0) else 0.0
        self.candidates.sort(key=lambda each: -each.first_order)

    def _gradients(self, batches: Sequence[Any]) -> list[Tensor]:
        """The mean gradient of every candidate, flat."""
        parameters = [list(each.graft.parameters()) for each in self.candidates]
        for each in self.candidates:
            each.graft.zero_grad()
        for batch in batches:
            (loss_of(self.host, batch, self.loss) / len(batches)).backward()
        return [
            torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in own])
            for own in parameters
        ]

    def run_heat(self, planned: int, size: int, share: float) -> bool:
        """Train and measure the ``size`` best in ``share`` of the time left; False if that is too short."""
        is_first = not any(each.runners for each in self.candidates)
        running = _one_per_place_first([c for c in self.candidates if is_first or c.runners])[:size]
        if is_first:
            for each in running:
                each.runners = [
                    Runner.candidate(self.host, each.site, copy.deepcopy(each.graft), rate)
                    for rate in SEED_RATES
                ]
        runners = [runner for each in running for runner in each.runners]
        control_steps = self._control_steps(running)
        measuring = self.seconds_to_measure * (len(runners) + len(self.controls))
        per_step = self.seconds_per_step * (len(runners) + control_steps * len(self.controls))
        steps = min(planned, int((share * self.clock.left - measuring) / per_step))
        if steps < LEAST_STEPS:
            return False
        started = time.monotonic()
        made = heat(
            runners,
            self.controls,
            self.batches,
            self.loss,
            steps=steps,
            control_steps=control_steps,
            out_of_time=lambda: self.clock.left < measuring,
        )
        self.seconds_per_step *= (time.monotonic() - started) / (per_step * max(made, 1))
        self._measure(running, [*runners, *self.controls])
        return made == steps

    def join_control(self, size: int) -> None:
        """Let the best go on in copies of the network that was trained longer, if that has helped."""
        if self.control is None or self.control.mean >= 0:
            return
        for each in _one_per_place_first(self.candidates)[:size]:
            each.runners = [runner.joined(self.controls[0]) for runner in each.runners]

    def _control_steps(self, running: Sequence[Candidate]) -> float:
        """Steps of a control for one of a candidate: the compute of host and costliest seed, or the most."""
        if self.host_flops == 0:
            return 1.0
        return min(MOST_CONTROL_STEPS, 1.0 + max(each.flops for each in running) / self.host_flops)

    def _measure(self, running: Sequence[Candidate], runners: Sequence[Runner]) -> None:
        """Take losses; of several rates the better one goes on, and those that did not run leave the race."""
        for runner in runners:
            runner.measure(self.probe)
        self.controls = [min(self.controls, key=self._loss)]
        control = self.controls[0].losses
        assert control is not None
        self.control = None if self.controls[0].has_diverged else self.probe.paired(control, self.base)
        # Who is not helped by training longer leaves the network as it is.
        reference = control if self.control is not None and self.control.mean < 0 else self.base
        for each in running:
            each.runners = [min(each.runners, key=self._loss)]
            losses = each.runners[0].losses
            assert losses is not None
            each.change, each.beyond = (
                self.probe.paired(losses, self.base),
                self.probe.paired(losses, reference),
            )
        self.out += [each for each in self.candidates if each not in running]
        self.candidates = sorted(running, key=lambda each: self._loss(each.runners[0]))

    def _loss(self, runner: Runner) -> float:
        assert runner.losses is not None
        return math.inf if runner.has_diverged else self.probe.mean(runner.losses)

    def diagnosis(self) -> Diagnosis:
        """The verdict on what was measured."""
        rows = [each.row() for each in [*self.candidates, *self.out]]
        rows.sort(key=lambda row: (-row.steps, math.inf if row.change is None else row.change.mean))
        val_loss = self.probe.mean(self.base)
        verdict, best, reason = decide(val_loss, rows, self.control)
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
            self.clock.spent,
            probe=self.probe,
            base=self.base,
        )


def _one_per_place_first(ordered: Sequence[Candidate]) -> list[Candidate]:
    """The best candidate of every place, then the rest."""
    best = {each.site.name: each for each in reversed(ordered)}
    return sorted(ordered, key=lambda each: best[each.site.name] is not each)
