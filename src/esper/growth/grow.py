"""The whole in one call: train a network, let it grow, get it back plain.

::

    grown = esper.grow(net, train_loader, val_loader, loss=F.cross_entropy, epochs=30, out="runs/mine")
    print(grown.summary())
    net = grown.net
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from esper.growth import saving
from esper.growth.events import GrowthEvent
from esper.growth.growth import Growth
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
from esper.leyline.errors import DataError, EsperError, RunDirectoryError

RATE: Final = 1e-3
"""Of the AdamW that trains where no optimiser is given."""
FORWARDS_PER_STEP: Final = 3
"""A backward costs two forwards."""
CHECKPOINT: Final = "checkpoint.pt"
LOG: Final = "log.txt"


@dataclass(frozen=True, slots=True)
class Epoch:
    """One sweep over the training batches."""

    train_loss: float
    val_loss: float
    params: int
    flops: float
    """Spent on training since the beginning."""


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
            f"parameters       {first.params:,} → {last.params:,}",
            f"training         {last.flops:.3g} FLOP in {len(self.epochs) - 1} epochs",
        ]
        told = [event for event in self.events if event.kind != "measured"]
        return "\n".join([*lines, *(map(str, told) if told else ["nothing was planted"])])

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
    out: Path | str | None = None,
    resume: bool = False,
    show: Callable[[str], None] = print,
) -> Grown:
    """Train ``net`` for ``epochs``, or until ``budget`` FLOPs are spent, and let it grow on the way.

    The rate of ``optimizer`` (AdamW where there is none) is held, and falls to zero over the last fifth. With
    ``out`` every epoch is saved there; ``resume`` goes on from it, bit for bit.
    """
    if (epochs is None) == (budget is None):
        raise EsperError("say how long to train, once: epochs=… or budget=… in FLOPs")
    check_loader(train_loader, "train_loader")
    check_loader(val_loader, "val_loader")
    device = next(net.parameters()).device
    [batch] = first_batches(train_loader, device, "train_loader", 1)
    optimizer = AdamW(net.parameters(), lr=RATE) if optimizer is None else optimizer
    growth = Growth(
        net,
        optimizer,
        sample=inputs_of(batch),
        slots=slots,
        controller=controller,
        higher_is_better=False,
        epochs=epochs,
        calibrate=_Inputs(train_loader, device),
        max_params=max_params,
    )
    run = _Run(growth, optimizer, loss, (train_loader, val_loader), epochs, budget, size_of(batch))
    folder = _folder(out, resume)
    if folder is not None and resume:
        run.load(torch.load(folder / CHECKPOINT, weights_only=True))
    for line in run.sweeps():
        show(line)
        if folder is not None:
            with (folder / LOG).open("a") as file:
                file.write(line + "\n")
            saving.write(run.state(), folder / CHECKPOINT)
    saved = saving.state_of(growth)
    return Grown(growth.finish(), tuple(run.epochs), tuple(run.events), saved)


def _folder(out: Path | str | None, resume: bool) -> Path | None:
    if out is None:
        if resume:
            raise EsperError("resume=True goes on from a folder; name it with out=")
        return None
    folder = Path(out)
    if resume and not (folder / CHECKPOINT).is_file():
        raise RunDirectoryError(f"'{folder}' holds no {CHECKPOINT} to resume from; leave resume out to begin")
    if not resume and folder.exists():
        raise RunDirectoryError(f"'{folder}' exists and is not overwritten; pass resume=True or another out=")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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
        self._spent = 0.0
        self.epochs: list[Epoch] = []
        self.events: list[GrowthEvent] = []
        self._schedule = LambdaLR(optimizer, lambda _step: wsd_factor(min(self._progress(), 1.0), 1, 0))

    def _progress(self) -> float:
        """Share of the training that is over."""
        if self._budget is not None:
            return self._spent / self._budget
        assert self._planned is not None
        done = max(len(self.epochs) - 1, 0)
        within = self._steps / self._steps_of_epoch if self._steps_of_epoch else 0.0
        return (done + min(within, 1.0)) / self._planned

    def sweeps(self) -> Iterator[str]:
        """Train to the end; a line for each epoch and each event."""
        if not self.epochs:
            self.epochs.append(Epoch(float("nan"), _mean(self._evaluate()), self._params(), 0.0))
        while self._progress() < 1.0:
            train_loss = self._train()
            self.epochs.append(Epoch(train_loss, float("nan"), self._params(), self._spent))
            losses = self._evaluate()
            events = self._growth.end_epoch(self._evaluate)
            self.epochs[-1] = last = Epoch(train_loss, _mean(losses), self._params(), self._spent)
            self.events += events
            line = f"epoch {len(self.epochs) - 1}: training {train_loss:.4g}, validation {last.val_loss:.4g}"
            yield "\n".join([f"{line}, {last.params:,} parameters", *map(str, events)])

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
            self._spent += FORWARDS_PER_STEP * self._growth.flops * share
            self._schedule.step()
            if self._budget is not None and self._spent >= self._budget:
                break
        if not total:
            raise DataError("train_loader is empty; at least one batch is needed")
        self._steps_of_epoch, self._steps = len(total), 0
        return _mean(total)

    @torch.no_grad()
    def _evaluate(self) -> list[float]:
        net = self._growth.net.eval()
        device = next(net.parameters()).device
        losses = [float(loss_of(net, on_device(batch, device), self._loss)) for batch in self._val_loader]
        if not losses:
            raise DataError("val_loader is empty; at least one batch is needed")
        return losses

    def _params(self) -> int:
        return sum(p.numel() for p in self._growth.net.parameters())

    # --- states ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that a training goes on from."""
        return {
            "net": self._growth.net.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "growth": self._growth.state_dict(),
            "epochs": [asdict(epoch) for epoch in self.epochs],
            "events": [asdict(event) for event in self.events],
            "spent": self._spent,
            "steps_of_epoch": self._steps_of_epoch,
            "rng": [torch.get_rng_state(), *(g.get_state() for g in self._generators())],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._growth.load_state_dict(state["growth"])
        self._growth.net.load_state_dict(state["net"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self.epochs = [Epoch(**epoch) for epoch in state["epochs"]]
        self.events = [GrowthEvent(**event) for event in state["events"]]
        self._spent, self._steps_of_epoch = state["spent"], state["steps_of_epoch"]
        torch.set_rng_state(state["rng"][0])
        for generator, position in zip(self._generators(), state["rng"][1:], strict=True):
            generator.set_state(position)

    def _generators(self) -> list[torch.Generator]:
        return [*generators_of(self._train_loader), *generators_of(self._val_loader)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
