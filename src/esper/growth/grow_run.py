"""One training by ``esper.grow``: each epoch trains, measures the seeds, lets the controller decide, and
writes rows; after some epochs a race runs before the decision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import nn

from esper.growth.batch_training import (
    EpochTrainer,
    Metric,
    generators_of,
    loss_of,
    metric_of,
    on_device,
    size_of,
)
from esper.growth.growth import Growth
from esper.growth.growth_events import GrowthEvent
from esper.growth.race import RACE, RACED_BLUEPRINTS, race_of
from esper.growth.race_candidates import (
    NOTHING_FITS,
    TOO_SHORT,
    candidate_sizes,
    candidates_at,
    least_race_flops,
)
from esper.growth.race_runners import Limit, adopt
from esper.growth.step_costs import StepCosts
from esper.kasmina.birth import Births
from esper.kasmina.compute import ComputeLedger
from esper.kasmina.dry_run import CALIBRATION_SAMPLES, batch_norms
from esper.kasmina.optimizer_groups import present_rates
from esper.leyline import DataError, LifecycleOp, RaceCandidate, RaceResult, legal_slots_by_op

if TYPE_CHECKING:
    from esper.run.grow_directory import GrowDirectory

MOMENTS: Final = (0.1, 0.3)
"""Fractions of the training after which a race is due; a race runs at the end of an epoch."""
RACE_SHARE: Final = 0.1
"""Largest fraction of the training's compute that all races together may use; if the training is short, the
first race may use this whole fraction.
"""
MOST_COST: Final = 4.0
"""Largest compute of a candidate seed, divided by that of the network; costlier seeds do not enter a race.
"""


@dataclass(frozen=True, slots=True)
class Epoch:
    """Losses, number of parameters and compute after one pass over the training batches."""

    train_loss: float
    val_loss: float
    params: int
    flops: float
    """FLOPs of training steps, races and counterfactuals since the start of the training."""
    metric: float | None = None
    """Mean of the user's metric over the validation batches; None if there is no metric."""


class GrowRun:
    """State of one training by ``esper.grow``: network, optimiser, loaders, and the history of epochs and
    events."""

    def __init__(
        self,
        growth: Growth,
        trainer: EpochTrainer,
        val_loader: Iterable[Any],
        metric: Metric | None,
        batch_size: int,
        sampled: int,
    ) -> None:
        self._growth, self._trainer, self._metric = growth, trainer, metric
        self._batch_size, self._sampled = batch_size, sampled
        self._optimizer, self._loss = trainer.optimizer, trainer.loss
        self._loaders = self._train_loader, self._val_loader = trainer.loader, val_loader
        self._host_flops = growth.flops / sampled
        self._directory: GrowDirectory | None = None
        self._evaluations = 0
        self._val_samples = 0
        self._broken = False
        self.races = True
        self.costs = StepCosts()
        """Costs of the candidates of races, and their unit."""
        self._raced = 0
        """Number of fractions in ``MOMENTS`` whose race has run or was skipped."""
        self.epochs: list[Epoch] = []
        self.events: list[GrowthEvent] = []

    def epochs_left(self) -> Iterator[str]:
        """Train to the end and yield the lines to print after each epoch."""
        growth = self._growth
        if not self.epochs:
            metric = None if self._metric is None else fmean(self._evaluate())
            self.epochs.append(Epoch(math.nan, fmean(self._losses()), self._params(), 0.0, metric))
            reason = self._why_no_race() if self.races else None
            if reason is not None:
                self._raced = len(MOMENTS)
                self.events.append(GrowthEvent(0, "raced", reason))
            self._save()
            if reason is not None:
                yield reason
        while self._trainer.progress < 1.0:
            with self._rows_of_epoch():
                train_loss = self._train_epoch()
                params = self._params()
                events = self._measure(is_last=self._trainer.progress >= 1.0)
                val_loss, metric = self._val_loss_and_metric()
                self._record(train_loss, val_loss)
                race = self._run_race() if self._race_is_due() else None
                # A race compares blocks that start without effect, so its winner is planted as such.
                growth.network.births = Births(zero=race is not None)
                decided = growth.decide(race)
                if race is not None:
                    events.append(self._raced_event(race, decided))
                events += decided
                self.epochs.append(Epoch(train_loss, val_loss, self._params(), growth.ledger.charged, metric))
                self._trainer.end_epoch(val_loss if metric is None else metric)
                self.events += events
            if self._trainer.line is not None:
                self._trainer.line.clear()
            line = f"epoch {len(self.epochs) - 1}: training {train_loss:.4g}, validation {val_loss:.4g}"
            line += "" if metric is None else f", metric {metric:.4g}"
            yield "\n".join([f"{line}, {params:,} parameters", *map(str, events)])
            self._save()

    def _train_epoch(self) -> float:
        growth = self._growth
        incubating = len(growth.network.incubating)
        with growth.ledger.timed("train"):
            train_loss = self._trainer.train(growth.flops / self._sampled, incubating, growth.incubate)
        self._broken = math.isnan(train_loss)
        if self._broken and not (growth.recovery and not growth.recovery.given_up and len(self.epochs) > 1):
            raise DataError(
                f"the training loss is not finite in epoch {len(self.epochs)}; look for values in the data"
                " that are not finite, or lower the learning rate"
            )
        return train_loss

    # --- measure --------------------------------------------------------------------------------------

    def _measure(self, *, is_last: bool) -> list[GrowthEvent]:
        """Measure network and seeds, and at the end remove seeds that a plan would not keep; the ledger does
        not count the counterfactuals of the last epoch."""
        growth, self._evaluations = self._growth, 0
        forward = growth.flops / self._sampled
        events = growth.measure_epoch(self._evaluate, every_seed=is_last, broken=self._broken)
        growth.ledger.charge(validation=forward * self._val_samples)
        if is_last:
            events += growth.end_trials(self._evaluate)
        else:
            calibrating = CALIBRATION_SAMPLES if batch_norms(growth.net) else 0
            samples = (self._evaluations - 1) * (self._val_samples + calibrating)
            growth.ledger.charge(counterfactual=forward * samples)
        return events

    def _val_loss_and_metric(self) -> tuple[float, float | None]:
        """Return the validation loss and the metric of the network that was measured last."""
        growth = self._growth
        if self._metric is None:
            return growth.measured.loss, None
        losses = self._losses()
        growth.ledger.charge(validation=growth.flops / self._sampled * self._val_samples)
        return fmean(losses), growth.measured.score if growth.mode == "max" else growth.measured.loss

    def _evaluate(self) -> list[float]:
        """Return the metric, or the loss if there is no metric, of every validation batch."""
        self._evaluations += 1
        if self._metric is None:
            return self._losses()
        metric = self._metric
        return self._validated(lambda net, batch: metric_of(net, batch, metric))

    def _losses(self) -> list[float]:
        return self._validated(lambda net, batch: float(loss_of(net, batch, self._loss)))

    @torch.no_grad()
    def _validated(self, value_of: Callable[[nn.Module, Any], float]) -> list[float]:
        """Return the result of ``value_of`` for every validation batch."""
        net = self._growth.net.eval()
        device = next(net.parameters()).device
        batches = [on_device(batch, device) for batch in self._val_loader]
        self._val_samples = sum(map(size_of, batches))
        if not batches:
            raise DataError("val_loader is empty; at least one batch is needed")
        return [value_of(net, batch) for batch in batches]

    # --- race -----------------------------------------------------------------------------------------

    def _why_no_race(self) -> str | None:
        """Return a sentence if no candidate fits, or if the training has too little compute for the shortest
        first heat of a race; None if a race can be run, or if the length of the training is unknown."""
        trainer, host = self._trainer, self._host_flops
        sites = [self._growth.network.sites[slot] for slot in self._free_slots()]
        sizes = candidate_sizes(self._growth.net, host, sites, self._growth.sample)
        seeds = [flops for parameters, flops in sizes if self._fits(parameters, flops)]
        if not seeds:
            return NOTHING_FITS
        per_batch = 3 * host * self._batch_size
        epochs = trainer.batches_per_epoch * (trainer.epochs or 0)
        batches = round(epochs if trainer.budget is None else trainer.budget / per_batch)
        limit = RACE_SHARE * batches * per_batch
        needed = least_race_flops(seeds, host, self._batch_size, self._val_samples, limit)
        if limit >= needed or not batches:
            return None
        least = math.ceil(needed / RACE_SHARE / per_batch)
        return (
            f"no race is run: the training has {batches:,} minibatches, and a race needs at least {least:,};"
            " train for longer, or diagnose the network and plan what to plant"
        )

    def _fits(self, parameters: int, flops: float) -> bool:
        """Return whether a seed of this size may enter a race."""
        network = self._growth.network
        room = math.inf if network.max_params is None else network.max_params - network.grown_params()
        return parameters <= room and flops <= MOST_COST * self._host_flops

    def _race_is_due(self) -> bool:
        """Return whether a race follows this epoch: the training has reached the next fraction in
        ``MOMENTS``, no seed is live, a slot is free, and compute for races is left.
        """
        table, ledger = self._growth.network.table, self._growth.ledger
        progress = self._trainer.progress
        due = sum(moment <= progress for moment in MOMENTS)
        if not self.races or due <= self._raced or table.live.any() or not self._free_slots():
            return False
        self._raced = due
        return not ledger.race or self._race_limit() >= ledger.race / 2

    def _race_limit(self) -> float:
        """Return the FLOPs that races may still use."""
        progress, ledger = self._trainer.progress, self._growth.ledger
        return RACE_SHARE * ledger.charged / progress - ledger.race

    def _free_slots(self) -> list[int]:
        network = self._growth.network
        free = legal_slots_by_op(network.table, network.rules)[0][LifecycleOp.GERMINATE]
        return list(np.flatnonzero(free).tolist())

    def _run_race(self) -> RaceResult:
        """Run a race in the free slots; the network then continues from the weights of the race's control."""
        growth, ledger = self._growth, self._growth.ledger
        limit, network = Limit(flops=self._race_limit()), growth.network
        names = network.action_space.blueprint_names
        with (
            ledger.timed("race"),
            present_rates(self._optimizer),
            race_of(growth.net, *self._loaders, self._loss, self._optimizer, limit, RACE, self.costs) as race,
        ):
            sites = [growth.network.sites[i] for i in self._free_slots()]
            every = candidates_at(race.host, race.host_flops, sites, RACED_BLUEPRINTS, growth.sample)
            race.candidates = [each for each in every if self._fits(each.parameters, each.flops)]
            found: list[RaceCandidate] = []
            fits = bool(race.candidates)
            if fits and race.run():
                adopt(race.controls[0], growth.net, self._optimizer)
                found = [
                    RaceCandidate(
                        slot=growth.slots.index(each.site.name),
                        blueprint=names.index(each.blueprint),
                        lead=-each.beyond.mean,
                        error=each.beyond.error,
                        cost=each.cost,
                    )
                    for each in race.candidates
                    if each.beyond is not None
                ]
            behind = bool(found) and found[0].lead < -found[0].error
            if behind or (fits and not found):
                # A network that is too small shows it in the first race, and an interrupted race would get no
                # more compute later.
                self._raced = len(MOMENTS)
            ledger.charge(race=limit.spent)
            self._race_note = TOO_SHORT if fits else NOTHING_FITS
            return RaceResult(tuple(found), race.probe.mean(race.base))

    def _raced_event(self, race: RaceResult, decided: Sequence[GrowthEvent]) -> GrowthEvent:
        if not race.candidates:
            return GrowthEvent(self._growth.epoch, "raced", self._race_note)
        best = race.candidates[0]
        name = self._growth.network.action_space.blueprint_names[best.blueprint]
        sentence = (
            f"{name} in {self._growth.slots[best.slot]} won a race,"
            f" {best.lead:+.2g} ± {best.error:.1g} ahead of training on, for {best.cost:.0%} more"
            f" {'FLOPs' if self.costs.unit == 'flops' else 'seconds'} per step"
        )
        if not any(event.kind == "germinated" for event in decided):
            sentence += ": it was not planted"
        return GrowthEvent(self._growth.epoch, "raced", sentence)

    # --- record ---------------------------------------------------------------------------------------

    def write_to(self, directory: GrowDirectory, settings: dict[str, Any], device: str) -> None:
        """Write rows and checkpoints to ``directory``; continue from the checkpoint in ``directory`` if there
        is one.
        """
        self._directory = directory
        name = "none" if self._growth.controller is None else self._growth.controller.name
        self._growth.recorder.sink = directory.begin(self._growth.network, name, settings, device, self._load)

    def _rows_of_epoch(self) -> Any:
        return nullcontext() if self._directory is None else self._directory.rows_of(len(self.epochs))

    def _record(self, train_loss: float, val_loss: float) -> None:
        """Emit the telemetry rows of the epoch; scores are null, because a user's loss has no scale from 0 to
        100. Configurations that were measured by a metric have no loss, and no row."""
        growth, measured = self._growth, self._growth.measured
        if self._metric is not None:
            measured = replace(measured, slots=())
        growth.recorder.epoch(
            replace(growth.facts, train_loss=train_loss, val_loss=val_loss, val_score=math.nan),
            replace(measured, scores=np.full_like(measured.scores, math.nan)),
            {name: growth.ledger.seconds.get(name, 0.0) for name in ("train", "measure")},
            twin_score=None,
            learning_rate=float(self._optimizer.param_groups[0]["lr"]),
            skipped_batches=int(self._broken),
            skipped_steps=0,
        )

    def record_end(self) -> None:
        """Emit one episode row for the whole training."""
        if self._directory is None:
            return
        growth, params = self._growth, self._params()
        with self._directory.rows_of(len(self.epochs), is_last=True):
            growth.recorder.episode(
                {
                    "val_score": None,
                    "val_loss": self.epochs[-1].val_loss,
                    "test_score": None,
                    "twin_val_score": None,
                    "best_val_score": None,
                    "host_params": params - growth.network.grown_params(),
                    "params": params,
                    "host_flops_per_sample": round(self._host_flops),
                    "flops_per_sample": round(growth.flops / self._sampled),
                    "flops": growth.ledger.flops(),
                    "rollbacks": growth.recovery.rollbacks if growth.recovery else 0,
                    "ended_by": "horizon" if self._trainer.budget is None else "budget",
                    "seconds": sum(growth.ledger.seconds.values()),
                }
            )

    def _params(self) -> int:
        return sum(p.numel() for p in self._growth.net.parameters())

    # --- state ----------------------------------------------------------------------------------------

    def _save(self) -> None:
        if self._directory is not None:
            self._directory.save(self._state())

    def _state(self) -> dict[str, Any]:
        """Return network, optimiser, counters and random states, from which the training can be resumed."""
        return {
            "net": self._growth.net.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "growth": self._growth.state_dict(),
            "recovery": self._growth.recovery and self._growth.recovery.state(),
            "epochs": [asdict(epoch) for epoch in self.epochs],
            "events": [asdict(event) for event in self.events],
            "recorder": self._growth.recorder.state(),
            "ledger": asdict(self._growth.ledger),
            "raced": self._raced,
            "costs": asdict(self.costs),
            "trainer": self._trainer.state(),
            "rng": [torch.get_rng_state(), *(g.get_state() for g in self._generators())],
        }

    def _load(self, state: dict[str, Any]) -> None:
        self._growth.load_state_dict(state["growth"])
        self._growth.net.load_state_dict(state["net"])
        if self._growth.recovery and state["recovery"]:
            self._growth.recovery.load_state(state["recovery"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.epochs = [Epoch(**epoch) for epoch in state["epochs"]]
        self.events = [GrowthEvent(**event) for event in state["events"]]
        self._growth.recorder.load_state(state["recorder"])
        self._growth.ledger = self._trainer.ledger = ComputeLedger(**state["ledger"])
        self._raced, self.costs = state["raced"], StepCosts(**state["costs"])
        self._trainer.load_state(state["trainer"])
        torch.set_rng_state(state["rng"][0])
        for generator, position in zip(self._generators(), state["rng"][1:], strict=True):
            generator.set_state(position)

    def _generators(self) -> list[torch.Generator]:
        return [*generators_of(self._train_loader), *generators_of(self._val_loader)]
