"""The whole in one call: train a network, let it grow, get it back plain.

::

    grown = esper.grow(net, train_loader, val_loader, loss=F.cross_entropy, epochs=30, out="runs/mine")
    print(grown.summary())
    net = grown.net
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from esper.growth import saving
from esper.growth.asking import Question, RaceController
from esper.growth.events import GrowthEvent
from esper.growth.finishing import plain_on_error
from esper.growth.growth import Growth
from esper.growth.limits import check_length
from esper.growth.membership import check_optimizer, held_rates
from esper.growth.surroundings import unwrapped
from esper.growth.user_batches import (
    Loss,
    check_loader,
    first_batches,
    generators_of,
    inputs_of,
    loss_of,
    on_device,
    size_of,
)
from esper.kasmina.optim import wsd_factor
from esper.leyline.errors import DataError, EsperError
from esper.tolaria.calibration import CALIBRATION_SAMPLES, batch_norms

if TYPE_CHECKING:
    from esper.growth.run_directory import RunDirectory
    from esper.leyline.rows import RunRow

RATE: Final = 1e-3
"""Of the AdamW that trains where no optimiser is given."""
FORWARDS_OF_STEP: Final = {"forward": 1, "backward": 2}


@dataclass(frozen=True, slots=True)
class Epoch:
    """One sweep over the training batches."""

    train_loss: float
    val_loss: float
    params: int
    flops: float
    """Spent since the beginning: on training, races and counterfactuals."""


@dataclass(frozen=True, slots=True)
class Grown:
    """A network that was grown, and how that went."""

    net: nn.Module
    """Plain: of its own class, with torch modules only."""
    epochs: tuple[Epoch, ...]
    """The first is the untrained network."""
    events: tuple[GrowthEvent, ...]
    saved: dict[str, Any]

    def summary(self) -> str:
        """What was gained, what it cost, and what stayed."""
        first, last = self.epochs[0], self.epochs[-1]
        best = min(epoch.val_loss for epoch in self.epochs)
        lines = [
            f"validation loss  {first.val_loss:.4g} → {last.val_loss:.4g} (best {best:.4g})",
            f"parameters       {first.params:,} → {last.params:,}{self._merged()}",
            f"training         {last.flops:.3g} FLOP in {len(self.epochs) - 1} epochs",
        ]
        lines += [str(event) for event in self.events if event.kind != "measured"]
        if not any(event.kind == "germinated" for event in self.events):
            lines.append("nothing was planted")
        return "\n".join(lines)

    def _merged(self) -> str:
        own = sum(p.numel() for p in self.net.parameters())
        return "" if own == self.epochs[-1].params else f", {own:,} since linear seeds became part of weights"

    def save(self, path: Path | str) -> None:
        """Weights and what was grown; ``esper.load(path, base=Net())`` brings the network back."""
        saving.save(self.saved, Path(path))


def grow(  # noqa: PLR0913  all but three by name
    net: nn.Module,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any],
    *,
    loss: Loss,
    epochs: int | None = None,
    budget: float | None = None,
    optimizer: Optimizer | None = None,
    slots: str | Sequence[str] = "auto",
    controller: Any = "auto",
    max_params: int | None = None,
    sample: Any = None,
    out: Path | str | None = None,
    resume: bool = False,
    show: Callable[[str], None] = print,
) -> Grown:
    """Train ``net`` for ``epochs``, or until ``budget`` FLOPs are spent, and let it grow on the way.

    The rate of ``optimizer`` (AdamW where there is none) is held, and falls to zero over the last fifth.
    ``sample`` is what the network is called with, where a batch does not say it.
    ``out`` is the directory of a run as any other: ``esper watch``, ``report``, ``serve`` and ``sql`` read
    it. With ``resume`` it goes on behind the last epoch that was saved there, bit for bit. Afterwards the
    optimiser has its rate again. After an error or Ctrl-C ``net`` is plain, as far as it was trained.
    """
    check_length(epochs, budget)
    check_loader(train_loader, "train_loader")
    check_loader(val_loader, "val_loader")
    device = next(unwrapped(net).parameters()).device
    [batch] = first_batches(train_loader, device, "train_loader", 1)
    optimizer = AdamW(net.parameters(), lr=RATE) if optimizer is None else optimizer
    check_optimizer(optimizer)
    inputs = inputs_of(batch) if sample is None else sample
    question = Question(net, optimizer, loss, (train_loader, val_loader), inputs, max_params)
    growth = Growth(
        net,
        optimizer,
        sample=inputs,
        slots=slots,
        controller=question.controller if controller == "auto" else controller,
        higher_is_better=False,
        epochs=epochs,
        calibrate=_Inputs(train_loader, device) if sample is None else None,
        max_params=max_params,
    )
    asked = {
        "loss": getattr(loss, "__name__", type(loss).__name__),
        "epochs": epochs,
        "budget": budget,
        "optimizer": type(optimizer).__name__,
        "learning_rate": float(optimizer.param_groups[0]["lr"]),
        "slots": slots if isinstance(slots, str) else list(slots),
        "controller": str(controller) if isinstance(controller, str | Path) else None,
        "max_params": max_params,
    }
    with ExitStack() as stack:
        stack.enter_context(held_rates(optimizer))
        stack.enter_context(plain_on_error(growth.finish))
        run = _Run(growth, optimizer, loss, (train_loader, val_loader), epochs, budget, size_of(inputs))
        if directory := _directory(out, resume=resume):
            stack.enter_context(directory)
            run.write_to(directory, growth.recorder.describe(Path(directory.path).name, asked, str(device)))
        for line in run.sweeps():
            show(line)
            run.save()
        run.end()
    saved = saving.state_of(growth)
    grown = Grown(growth.finish(), tuple(run.epochs), tuple(run.events), saved)
    if directory:
        show(f"run saved in {directory.path}; what came of it: esper report {directory.path}")
    return grown


def _directory(out: Path | str | None, *, resume: bool) -> RunDirectory | None:
    if out is None:
        if resume:
            raise EsperError("resume=True goes on from a folder; name it with out=")
        return None
    from esper.growth.run_directory import RunDirectory  # noqa: PLC0415  a database that few need

    return RunDirectory(Path(out), resume=resume)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The batches of a loader without their targets."""

    loader: Iterable[Any]
    device: torch.device

    def __iter__(self) -> Iterator[Any]:
        return (inputs_of(on_device(batch, self.device)) for batch in self.loader)


class _Run:
    """A training under way."""

    def __init__(
        self,
        growth: Growth,
        optimizer: Optimizer,
        loss: Loss,
        loaders: tuple[Iterable[Any], Iterable[Any]],
        planned: int | None,
        budget: float | None,
        sampled: int,
    ) -> None:
        self._growth, self._optimizer, self._loss = growth, optimizer, loss
        self._train_loader, self._val_loader = loaders
        self._planned, self._budget, self._sampled = planned, budget, sampled
        self._steps = 0
        self._steps_of_epoch = 0
        self._flops = {"forward": 0.0, "backward": 0.0, "race": 0.0, "counterfactual": 0.0}
        self._seconds = 0.0
        self._host_flops = growth.flops / sampled
        self._directory: RunDirectory | None = None
        self._means: list[float] = []
        """Of the evaluations in this epoch; the first is that of the network as it stands."""
        self._val_samples = 0
        self.epochs: list[Epoch] = []
        self.events: list[GrowthEvent] = []
        self._schedule = LambdaLR(optimizer, lambda _step: wsd_factor(min(self._progress(), 1.0), 1, 0))

    @property
    def _spent(self) -> float:
        return sum(self._flops.values())

    def _progress(self) -> float:
        """Share of the training that is over."""
        if self._budget is not None:
            return self._spent / self._budget
        assert self._planned is not None
        done = max(len(self.epochs) - 1, 0)
        within = self._steps / self._steps_of_epoch if self._steps_of_epoch else 0.0
        return (done + min(within, 1.0)) / self._planned

    def write_to(self, directory: RunDirectory, described: RunRow) -> None:
        """Write rows and checkpoints there, and go on from its checkpoint if it has one."""
        self._directory = directory
        self._growth.recorder.sink = directory.begin(described)
        if directory.checkpoint is not None:
            self._load(directory.checkpoint)

    def sweeps(self) -> Iterator[str]:
        """Train to the end; a line for each epoch and each event."""
        if not self.epochs:
            self._evaluate()
            self.epochs.append(Epoch(float("nan"), self._means[0], self._params(), 0.0))
            self.save()
        while self._progress() < 1.0:
            with self._rows_of(len(self.epochs)):
                lines = self._sweep()
            yield "\n".join(lines)

    def _sweep(self) -> list[str]:
        began, recorder = perf_counter(), self._growth.recorder
        recorder.begin_epoch()
        train_loss = self._train()
        recorder.end_training(train_loss, float(self._optimizer.param_groups[0]["lr"]))
        params = self._params()  # of the network whose losses these are: it may grow now
        events = self._end_epoch()
        last = Epoch(train_loss, self._means[0], self._params(), self._spent)
        self.epochs.append(last)
        self._steps = 0
        self.events += events
        self._seconds += perf_counter() - began
        line = f"epoch {len(self.epochs) - 1}: training {train_loss:.4g}, validation {last.val_loss:.4g}"
        return [f"{line}, {params:,} parameters", *map(str, events)]

    def _end_epoch(self) -> list[GrowthEvent]:
        """Measure and let it grow; races and counterfactuals are charged to the training."""
        races, forward = self._growth.controller, self._growth.flops / self._sampled
        if isinstance(races, RaceController):
            races.begin_epoch(self._progress(), self._spent)
        self._means.clear()
        is_last = self._progress() >= 1.0
        events = self._growth.end_epoch(self._evaluate, every_seed=is_last)
        if isinstance(races, RaceController) and races.sentence:
            self._flops["race"] += races.flops
            events.insert(0, GrowthEvent(self._growth.epoch, "raced", races.sentence))
        if not is_last:  # the last is for the reader
            calibrating = CALIBRATION_SAMPLES if batch_norms(self._growth.net) else 0
            samples = (len(self._means) - 1) * (self._val_samples + calibrating)
            self._flops["counterfactual"] += forward * samples
        return events

    def _rows_of(self, epoch: int, *, is_last: bool = False) -> AbstractContextManager[None]:
        return nullcontext() if self._directory is None else self._directory.rows_of(epoch, is_last=is_last)

    def save(self) -> None:
        """Leave a checkpoint, where there is a directory for it."""
        if self._directory is not None:
            self._directory.save(self._state())

    def end(self) -> None:
        """Write what the whole training came to."""
        with self._rows_of(len(self.epochs), is_last=True):
            self._growth.recorder.finished(
                val_loss=self.epochs[-1].val_loss,
                host_flops_per_sample=round(self._host_flops),
                flops_per_sample=round(self._growth.flops / self._sampled),
                flops={purpose: round(amount) for purpose, amount in self._flops.items()},
                ended_by="horizon" if self._budget is None else "budget",
                seconds=self._seconds,
            )

    def _train(self) -> float:
        net, total = self._growth.net.train(), []
        device = next(net.parameters()).device
        self._steps = 0
        for batch in self._train_loader:
            value = loss_of(net, on_device(batch, device), self._loss)
            if not torch.isfinite(value):
                raise DataError(
                    f"the training loss is {value.item()} in epoch {len(self.epochs)}; look for values in the"
                    " data that are not finite, or lower the learning rate"
                )
            self._optimizer.zero_grad()
            value.backward()
            self._optimizer.step()
            total.append(float(value.detach()))
            self._steps += 1
            share = size_of(batch) / self._sampled
            for purpose, forwards in FORWARDS_OF_STEP.items():
                self._flops[purpose] += forwards * self._growth.flops * share
            self._schedule.step()
            if self._budget is not None and self._spent >= self._budget:
                break
        if not total:
            raise DataError("train_loader is empty; at least one batch is needed")
        self._steps_of_epoch = len(total)
        return _mean(total)

    @torch.no_grad()
    def _evaluate(self) -> list[float]:
        net = self._growth.net.eval()
        device = next(net.parameters()).device
        batches = [on_device(batch, device) for batch in self._val_loader]
        self._val_samples = sum(map(size_of, batches))
        losses = [float(loss_of(net, batch, self._loss)) for batch in batches]
        if not losses:
            raise DataError("val_loader is empty; at least one batch is needed")
        self._means.append(_mean(losses))
        return losses

    def _params(self) -> int:
        return sum(p.numel() for p in self._growth.net.parameters())

    # --- states ---------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """Everything that a training goes on from."""
        return {
            "net": self._growth.net.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "growth": self._growth.state_dict(),
            "epochs": [asdict(epoch) for epoch in self.epochs],
            "events": [asdict(event) for event in self.events],
            "recorder": self._growth.recorder.state(),
            "flops": self._flops,
            "seconds": self._seconds,
            "steps_of_epoch": self._steps_of_epoch,
            "rng": [torch.get_rng_state(), *(g.get_state() for g in self._generators())],
        }

    def _load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._growth.load_state_dict(state["growth"])
        self._growth.net.load_state_dict(state["net"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self.epochs = [Epoch(**epoch) for epoch in state["epochs"]]
        self.events = [GrowthEvent(**event) for event in state["events"]]
        self._growth.recorder.load_state(state["recorder"])
        self._flops, self._seconds = dict(state["flops"]), state["seconds"]
        self._steps_of_epoch = state["steps_of_epoch"]
        torch.set_rng_state(state["rng"][0])
        for generator, position in zip(self._generators(), state["rng"][1:], strict=True):
            generator.set_state(position)

    def _generators(self) -> list[torch.Generator]:
        return [*generators_of(self._train_loader), *generators_of(self._val_loader)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
