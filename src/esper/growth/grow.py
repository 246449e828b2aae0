"""Training and growth of a network in one call.

::

    grown = esper.grow(net, train_loader, val_loader, loss=F.cross_entropy, epochs=30, out="runs/mine")
    print(grown.summary())
    net = grown.net
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from esper.growth.batch_training import (
    Loss,
    check_length,
    check_loader,
    first_batches,
    inputs_of,
    on_device,
    size_of,
)
from esper.growth.grow_run import Epoch, GrowRun
from esper.growth.growth import Growth
from esper.growth.growth_events import GrowthEvent
from esper.growth.torch_wrappers import unwrapped
from esper.kasmina import network_file
from esper.kasmina.compute import ComputeLedger
from esper.kasmina.optimizer_groups import check_optimizer, held_rates
from esper.kasmina.plain import plain_on_error
from esper.leyline.errors import EsperError

if TYPE_CHECKING:
    from esper.run.grow_directory import GrowDirectory

RATE: Final = 1e-3
"""Learning rate of AdamW if the caller gives no optimiser."""


@dataclass(frozen=True, slots=True)
class Grown:
    """Result of ``esper.grow``: the grown network and the history of its training."""

    net: nn.Module
    """Grown network as a plain module of its own class, with torch modules only."""
    epochs: tuple[Epoch, ...]
    """Results by epoch; the first entry is the untrained network."""
    events: tuple[GrowthEvent, ...]
    ledger: ComputeLedger
    """FLOPs and seconds of the training by purpose."""
    saved: dict[str, Any]

    def __repr__(self) -> str:
        last = self.epochs[-1]
        name = type(self.net).__name__
        return f"Grown({name}, {last.params:,} parameters, validation loss {last.val_loss:.4g})"

    def summary(self) -> str:
        """Return losses, parameters, compute and growth events as text."""
        first, last = self.epochs[0], self.epochs[-1]
        best = min(epoch.val_loss for epoch in self.epochs)
        own = sum(p.numel() for p in self.net.parameters())
        merged = "" if own == last.params else f", {own:,} since linear seeds became part of weights"
        lines = [
            f"validation loss  {first.val_loss:.4g} → {last.val_loss:.4g} (best {best:.4g})",
            f"parameters       {first.params:,} → {last.params:,}{merged}",
            f"training         {last.flops:.3g} FLOP in {len(self.epochs) - 1} epochs",
        ]
        lines += [str(event) for event in self.events if event.kind != "measured"]
        if not any(event.kind == "germinated" for event in self.events):
            lines.append("nothing was planted")
        return "\n".join(lines)

    def save(self, path: Path | str) -> None:
        """Write weights and seeds to ``path``; ``esper.load(path, base=Net())`` returns the network."""
        network_file.save(self.saved, Path(path))


def grow(  # noqa: PLR0913  all arguments but three are keyword-only
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
    races: bool | None = None,
    max_params: int | None = None,
    sample: Any = None,
    follow: Sequence[Any] = (),
    rollback: bool = True,
    shapley: bool = False,
    incubation_epochs: int = 0,
    out: Path | str | None = None,
    resume: bool = False,
    show: Callable[[str], None] = print,
) -> Grown:
    """Train ``net`` and plant seeds during the training.

    The learning rate is constant and falls to zero over the last fifth of the training. After an error or
    Ctrl-C ``net`` is a plain module with the weights trained so far, and the optimiser has its initial
    learning rate.

    Args:
        net: Network to train.
        train_loader: Training batches. Batches ``(inputs…, target)`` are used as
            ``loss(net(*inputs), target)``, all others as ``loss(net, batch)``.
        val_loader: Validation batches.
        loss: Loss function.
        epochs: Length of the training in passes over ``train_loader``.
        budget: Length of the training in FLOPs, instead of ``epochs``.
        optimizer: Optimiser of ``net``; AdamW with learning rate 0.001 unless given.
        slots: Names of submodules, globs, or ``"auto"``.
        controller: As in ``Growth``; ``"auto"`` plants the winners of races.
        races: Run races, so that the controller can read their results; by default only for ``"auto"`` and
            ``"race"``.
        max_params: Largest number of parameters of all seeds together.
        sample: Input that the network is called with; required if it does not follow from a batch.
        follow: Copies of the network that receive every seed too.
        rollback: Return to the last good epoch when the validation loss diverges.
        shapley: Also measure Shapley values and interactions of the seeds.
        incubation_epochs: Epochs in which a new seed learns without changing the output.
        out: Directory of a run that ``esper watch``, ``report``, ``serve`` and ``sql`` read.
        resume: Continue after the last epoch saved in ``out``, bit for bit.
        show: Called with each line of output.

    Returns:
        The plain network with its history.

    Raises:
        DataError: A loader or the loss cannot be used.
        HostError: The network cannot be grown.
        EsperError: Another argument is not valid.

    Example:
        >>> grown = esper.grow(net, train, validation, loss=F.cross_entropy, epochs=30)
    """
    check_length(epochs, budget)
    check_loader(train_loader, "train_loader")
    check_loader(val_loader, "val_loader")
    device = next(unwrapped(net).parameters()).device
    [batch] = first_batches(train_loader, device, "train_loader", 1)
    optimizer = AdamW(net.parameters(), lr=RATE, fused=True) if optimizer is None else optimizer
    check_optimizer(optimizer)
    inputs = inputs_of(batch) if sample is None else sample
    directory = _directory(out, resume=resume)
    is_default = isinstance(controller, str) and controller in {"auto", "race"}
    growth = Growth(
        net,
        optimizer,
        sample=inputs,
        slots=slots,
        controller="race" if is_default else controller,
        higher_is_better=False,
        epochs=epochs,
        calibrate=_Inputs(train_loader, device) if sample is None else None,
        max_params=max_params,
        follow=follow,
        rollback=rollback,
        shapley=shapley,
        incubation_epochs=incubation_epochs,
    )
    settings = {
        "loss": getattr(loss, "__name__", type(loss).__name__),
        "epochs": epochs,
        "budget": budget,
        "optimizer": type(optimizer).__name__,
        "learning_rate": float(optimizer.param_groups[0]["lr"]),
        "slots": slots if isinstance(slots, str) else list(slots),
        "controller": str(controller) if isinstance(controller, str | Path) else None,
        "max_params": max_params,
        "rollback": rollback,
        "incubation_epochs": incubation_epochs,
    }
    with ExitStack() as stack:
        stack.enter_context(plain_on_error(growth.finish))
        stack.enter_context(held_rates(optimizer))
        run = GrowRun(growth, optimizer, loss, (train_loader, val_loader), epochs, budget, size_of(inputs))
        run.races = is_default if races is None else races
        if directory is not None:
            stack.enter_context(directory)
            run.write_to(directory, settings, str(device))
        for line in run.epochs_left():
            show(line)
        run.record_end()
        saved = network_file.network_state(growth.network)
    grown = Grown(growth.finish(), tuple(run.epochs), tuple(run.events), growth.ledger, saved)
    if directory is not None:
        show(f"run saved in {directory.path}; what came of it: esper report {directory.path}")
    return grown


def _directory(out: Path | str | None, *, resume: bool) -> GrowDirectory | None:
    if out is None:
        if resume:
            raise EsperError("resume=True goes on from a folder; name it with out=")
        return None
    # imported here because it loads a database library
    from esper.run.grow_directory import GrowDirectory  # noqa: PLC0415

    return GrowDirectory(Path(out), resume=resume)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Iterable over the inputs of a loader's batches, without targets."""

    loader: Iterable[Any]
    device: torch.device

    def __iter__(self) -> Iterator[Any]:
        return (inputs_of(on_device(batch, self.device)) for batch in self.loader)
