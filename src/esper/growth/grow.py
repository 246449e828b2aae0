"""Training and growth of a network in one call.

::

    grown = esper.grow(net, train_loader, val_loader, loss=F.cross_entropy, epochs=30, out="runs/mine")
    print(grown.summary())
    net = grown.net
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from esper.growth.argument_checks import (
    check_amp,
    check_cost,
    check_length,
    check_metric,
    check_steps,
    device_named,
    schedule_of,
)
from esper.growth.batch_training import (
    EpochTrainer,
    Loss,
    Metric,
    check_loader,
    first_batches,
    inputs_of,
    on_device,
    size_of,
)
from esper.growth.grow_run import Epoch, GrowRun
from esper.growth.growth import Growth
from esper.growth.growth_events import GrowthEvent, ProgressLine
from esper.growth.race_runners import CostUnit
from esper.growth.step_costs import StepCosts
from esper.growth.torch_wrappers import unwrapped
from esper.kasmina.blueprints import all_blueprints
from esper.kasmina.compute import ComputeLedger
from esper.kasmina.optimizer_groups import check_optimizer, rates_of, restore_rates
from esper.kasmina.transaction import Transaction, uninterrupted
from esper.leyline.errors import EsperError, GrowthWarning
from esper.tamiyo.controller_registry import blueprints_of

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
    """Losses, parameters and FLOPs by epoch; the first entry describes the untrained network."""
    events: tuple[GrowthEvent, ...]
    ledger: ComputeLedger
    """FLOPs and seconds of the whole call, by purpose such as training, validation or races."""
    unsaved: str | None = None
    """Error message if the run directory ``out`` could not be written completely, else None."""

    def __repr__(self) -> str:
        last = self.epochs[-1]
        name = type(self.net).__name__
        return f"Grown({name}, {last.params:,} parameters, validation loss {last.val_loss:.4g})"

    def summary(self) -> str:
        """Return a text with the losses, parameters, compute and growth events of the training."""
        first, last = self.epochs[0], self.epochs[-1]
        best = min(epoch.val_loss for epoch in self.epochs)
        own = sum(p.numel() for p in self.net.parameters())
        merged = "" if own == last.params else f", {own:,} since linear seeds became part of weights"
        lines = [
            f"validation loss  {first.val_loss:.4g} → {last.val_loss:.4g} (best {best:.4g})",
            f"parameters       {first.params:,} → {last.params:,}{merged}",
            f"training         {last.flops:.3g} FLOP in {len(self.epochs) - 1} epochs",
        ]
        if first.metric is not None and last.metric is not None:
            lines.insert(1, f"metric           {first.metric:.4g} → {last.metric:.4g}")
        lines += [str(event) for event in self.events if event.kind != "measured"]
        if not any(event.kind == "germinated" for event in self.events):
            lines.append("nothing was planted")
        return "\n".join(lines)

    def save(self, path: Path | str) -> None:
        """Write the present weights of ``net`` and its seeds to ``path``; ``esper.load(path, base=Net())``
        returns the network.

        Args:
            path: File to write, in the format safetensors; missing folders are made.

        Raises:
            HostError: The state dict of the network contains something other than tensors.
            SaveError: The file could not be written; an older file at ``path`` is unchanged.
        """
        from esper.kasmina import network_file  # noqa: PLC0415  needed for files only

        network_file.save(self.net, Path(path))


def grow(  # noqa: PLR0913  all arguments but three are keyword-only
    net: nn.Module,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any],
    *,
    loss: Loss,
    epochs: int | None = None,
    budget: float | None = None,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    clip: float | None = None,
    accumulate: int = 1,
    amp: torch.dtype | None = None,
    metric: Metric | None = None,
    mode: str | None = None,
    device: torch.device | str | None = None,
    slots: str | Sequence[str] = "auto",
    controller: Any = "auto",
    races: bool | None = None,
    cost: CostUnit = "seconds",
    max_params: int | None = None,
    sample: Any = None,
    follow: Sequence[Any] = (),
    rollback: bool = True,
    shapley: bool = False,
    incubation_epochs: int = 0,
    out: Path | str | None = None,
    resume: bool = False,
    show: Callable[[str], None] = print,
    progress: bool | None = None,
) -> Grown:
    """Train ``net`` and plant seeds during the training.

    Without a scheduler the learning rate is constant until the last fifth of the training, in which it falls
    to zero, and the optimiser gets its initial learning rate back at the end. After an error or Ctrl-C
    ``net`` is a plain module with the weights trained so far.

    Args:
        net: Network to train.
        train_loader: Training batches. Batches ``(inputs…, target)`` are used as
            ``loss(net(*inputs), target)``, all others as ``loss(net, batch)``.
        val_loader: Validation batches.
        loss: Loss function, called with output and target, or with network and batch.
        epochs: Length of the training in passes over ``train_loader``.
        budget: Length of the training in FLOPs, instead of ``epochs``.
        optimizer: Optimiser of ``net``; AdamW with learning rate 0.001 unless given.
        scheduler: Learning-rate scheduler of ``optimizer``, stepped after every epoch; or a dict as in
            Lightning, ``{"scheduler": scheduler, "interval": "step"}``, to step it after every optimiser
            step. ``ReduceLROnPlateau`` reads the metric, or the validation loss if there is none.
        clip: Largest norm of the gradient; larger gradients are scaled down.
        accumulate: Number of minibatches per optimiser step.
        amp: Autocast dtype of training steps, ``torch.bfloat16`` or on CUDA ``torch.float16``; validation
            and races keep the precision of the network.
        metric: Function that is called like ``loss`` and returns one number per validation batch; seeds are
            measured by it instead of by the validation loss. Races compare losses.
        mode: Direction of ``metric``: ``"min"``, or ``"max"`` if larger values are better.
        device: Device to which network, copies in ``follow`` and batches are moved; by default batches are
            moved to the device of the network.
        slots: Names or globs of the submodules after which seeds may be planted, or ``"auto"``.
        controller: Controller of the seeds, as in ``Growth``; ``"auto"`` plants the winners of races.
        races: Whether to run races, whose results the controller reads; by default only for ``"auto"`` and
            ``"race"``.
        cost: Unit in which the compute of a race's candidates is weighed: measured ``"seconds"`` per
            training step, or ``"flops"``, with which two equal trainings are equal bit for bit.
        max_params: Largest number of parameters of all seeds together.
        sample: Input that the network is called with; required if it cannot be read from a training batch.
        follow: Copies of the network, such as an average of its weights, that also receive every seed.
        rollback: Whether to return to the last good epoch when the validation loss diverges.
        shapley: Whether to also measure Shapley values and interactions of the seeds.
        incubation_epochs: Epochs in which a new seed learns without changing the output of the network.
        out: Run directory to write, which ``esper watch``, ``report``, ``serve`` and ``sql`` can read.
        resume: Whether to continue after the last epoch saved in ``out``; the result is bit-equal to that of
            an uninterrupted training.
        show: Function that is called with each line of output.
        progress: Whether to show a line on stderr with the time left; by default only in a terminal.

    Returns:
        The grown network as a plain module, with the history of its training. If ``out`` could not be
        written, a ``GrowthWarning`` is issued, and the attribute ``unsaved`` has its text.

    Raises:
        DataError: A data loader or the loss function cannot be used.
        HostError: Seeds cannot be planted in the network.
        EsperError: An argument is not valid.

    Example:
        >>> grown = esper.grow(net, train, validation, loss=F.cross_entropy, epochs=30)
    """
    check_length(epochs, budget)
    directory = _directory(out, resume=resume)
    check_steps(clip, accumulate, progress)
    check_metric(metric, mode)
    check_cost(cost)
    check_loader(train_loader, "train_loader")
    check_loader(val_loader, "val_loader")
    place = next(unwrapped(net).parameters()).device if device is None else device_named(device)
    check_amp(amp, place)
    schedule, steps_schedule = schedule_of(scheduler, optimizer)
    [batch] = first_batches(train_loader, place, "train_loader", 1)
    optimizer = AdamW(net.parameters(), lr=RATE, fused=True) if optimizer is None else optimizer
    check_optimizer(optimizer)
    inputs = inputs_of(batch) if sample is None else on_device(sample, place)
    is_default = isinstance(controller, str) and controller in {"auto", "race"}
    line = ProgressLine(sys.stderr) if progress or (progress is None and sys.stderr.isatty()) else None
    with _UndoOnError(net, follow, optimizer, schedule, line) as undo:
        if resume:
            undo.keep_weights()
        if device is not None:
            undo.move_to(place)
        growth = Growth(
            net,
            optimizer,
            sample=inputs,
            mode="min" if mode is None else mode,
            slots=slots,
            controller="race" if is_default else controller,
            epochs=epochs,
            calibrate=_Inputs(train_loader, place) if sample is None else None,
            max_params=max_params,
            follow=follow,
            rollback=rollback,
            shapley=shapley,
            incubation_epochs=incubation_epochs,
            blueprints=_blueprints_of(controller),
        )
        settings = {
            "loss": _name_of(loss),
            "epochs": epochs,
            "budget": budget,
            "optimizer": type(optimizer).__name__,
            "learning_rate": float(optimizer.param_groups[0]["lr"]),
            "scheduler": None if schedule is None else type(schedule).__name__,
            "clip": clip,
            "accumulate": accumulate,
            "amp": None if amp is None else str(amp),
            "metric": None if metric is None else _name_of(metric),
            "mode": mode,
            "slots": slots if isinstance(slots, str) else list(slots),
            "cost": cost,
            "controller": str(controller) if isinstance(controller, str | Path) else None,
            "max_params": max_params,
            "rollback": rollback,
            "incubation_epochs": incubation_epochs,
        }
        trainer = EpochTrainer(
            growth.net,
            optimizer,
            loss,
            train_loader,
            growth.ledger,
            epochs,
            budget,
            scheduler=schedule,
            steps_scheduler=steps_schedule,
            clip=clip,
            accumulate=accumulate,
            amp=amp,
            line=line,
        )
        run = GrowRun(growth, trainer, val_loader, metric, size_of(batch), size_of(inputs))
        run.races = is_default if races is None else races
        run.costs = StepCosts(cost)
        with nullcontext() if directory is None else directory:
            if directory is not None:
                run.write_to(directory, settings, str(place))
            undo.growth = growth
            for text in run.epochs_left():
                _show(text, show)
            run.record_end()
        unsaved = None if directory is None else directory.unsaved
        grown = Grown(growth.finish(), tuple(run.epochs), tuple(run.events), growth.ledger, unsaved)
        _show_end(directory, show)
    return grown


class _UndoOnError(AbstractContextManager["_UndoOnError"]):
    """Undoes all preparations after an error before the training has begun; after a later error the network
    becomes a plain module. Without a scheduler the optimiser gets its learning rates back in any case."""

    def __init__(
        self,
        net: nn.Module,
        follow: Sequence[Any],
        optimizer: Optimizer,
        schedule: LRScheduler | None,
        line: ProgressLine | None,
    ) -> None:
        self.growth: Growth | None = None
        """``Growth`` of the network; None until the training begins."""
        self._modules = [unwrapped(net), *(each for each in follow if isinstance(each, nn.Module))]
        self._optimizer, self._schedule, self._line = optimizer, schedule, line
        self._start = Transaction(self._modules, [optimizer], [] if schedule is None else [schedule])
        self._rates = rates_of(optimizer)
        self._home: torch.device | None = None

    def keep_weights(self) -> None:
        """Copy all weights, because a resumed training loads others before it begins."""
        self._start.keep(self._modules[0].parameters())

    def move_to(self, device: torch.device) -> None:
        """Move networks and the state of the optimiser to a device."""
        self._home = next(self._modules[0].parameters()).device
        for module in self._modules:
            module.to(device)
        self._optimizer.load_state_dict(self._optimizer.state_dict())  # The state follows the parameters.

    def __exit__(self, kind: Any, error: BaseException | None, _trace: Any) -> None:
        with uninterrupted():
            if self._line is not None:
                self._line.clear()
            if self._schedule is None:
                restore_rates(self._optimizer, self._rates)
            if error is None:
                return
            if self.growth is not None:
                self._start.restore_switches()
                _add_notes(error, self.growth.abandon())
                return
            self._start.undo()
            if self._home is not None:
                self.move_to(self._home)


def _blueprints_of(controller: Any) -> list[str] | None:
    """Return the blueprints in a plan and all that need no trial forward passes; None, for all blueprints, if
    the controller is no plan or the plan has an unknown name."""
    planned, specs = blueprints_of(controller), all_blueprints()
    if planned is None or planned - {spec.name for spec in specs}:
        return None
    return sorted(planned | {spec.name for spec in specs if not (spec.copies or spec.widens)})


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _add_notes(error: BaseException, untraced: Iterable[str]) -> None:
    """Add a note to ``error`` for each seed that could not be turned into plain modules."""
    for name in untraced:
        error.add_note(f"the seed in {name} cannot be traced, and stays in the network as a module of esper")


def _show_end(directory: GrowDirectory | None, show: Callable[[str], None]) -> None:
    """Show where the run was saved, or issue a warning if a part of it could not be saved."""
    if directory is None:
        return
    if directory.unsaved is not None:
        GrowthWarning.issue(directory.unsaved)
    else:
        _show(f"run saved in {directory.path}; what came of it: esper report {directory.path}", show)


def _show(line: str, show: Callable[[str], None]) -> None:
    """Call ``show``; output that cannot be written, as on a full disk, does not end the training."""
    try:
        show(line)
    except OSError as error:
        GrowthWarning.issue(f"the progress cannot be shown: {error.strerror}; the training continues")


def _directory(out: Path | str | None, *, resume: bool) -> GrowDirectory | None:
    if out is None:
        if resume:
            raise EsperError("resume=True goes on from a folder; name it with out=")
        return None
    # ``esper.run.grow_directory`` is imported only if needed, because it loads a database library.
    from esper.run.grow_directory import GrowDirectory  # noqa: PLC0415

    return GrowDirectory(Path(out), resume=resume)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Iterable over the inputs of a loader's batches, without targets."""

    loader: Iterable[Any]
    device: torch.device

    def __iter__(self) -> Iterator[Any]:
        return (inputs_of(on_device(batch, self.device)) for batch in self.loader)
