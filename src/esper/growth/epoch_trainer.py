"""Training of a network on a user's loader, one epoch at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from esper.growth.batch_training import Loss, loss_of, on_device, size_of
from esper.growth.progress_line import ProgressLine
from esper.kasmina.compute import ComputeLedger
from esper.kasmina.optimizer_groups import DECAY_SHARE, wsd_factor
from esper.leyline.errors import DataError


@dataclass
class EpochTrainer:
    """Trains a network on a loader. Unless there is a scheduler, the learning rate is constant until the last
    fifth of the training, in which it falls to zero."""

    net: nn.Module
    optimizer: Optimizer
    loss: Loss
    loader: Iterable[Any]
    ledger: ComputeLedger
    epochs: int | None
    """Length of the training in passes over the loader; None if a compute budget is given."""
    budget: float | None
    """Compute budget of the training in FLOPs."""
    scheduler: LRScheduler | None = None
    steps_scheduler: bool = False
    """Whether the scheduler is stepped after every optimiser step; otherwise after every epoch."""
    clip: float | None = None
    """Largest norm of the gradient of an optimiser step; None for no limit."""
    accumulate: int = 1
    """Number of minibatches per optimiser step; the last step of an epoch may have fewer."""
    amp: torch.dtype | None = None
    """Autocast dtype of training steps; None trains without autocast."""
    line: ProgressLine | None = None
    done: int = 0
    """Number of epochs trained so far."""
    steps: int = 0
    """Number of optimiser steps in the current epoch so far."""
    steps_of_epoch: int = 0
    """Number of optimiser steps in the last complete epoch; 0 before the first epoch ends."""

    def __post_init__(self) -> None:
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._device = next(self.net.parameters()).device
        self._scaler = GradScaler(self._device.type, enabled=self.amp is torch.float16)

    @property
    def progress(self) -> float:
        """Fraction of the training that is done, from 0 to 1."""
        return self._progress(self.steps_of_epoch)

    def _progress(self, steps_of_epoch: int) -> float:
        if self.budget is not None:
            return self.ledger.charged / self.budget
        assert self.epochs is not None
        within = self.steps / steps_of_epoch if steps_of_epoch else 0.0
        return (self.done + min(within, 1.0)) / self.epochs

    @property
    def batches_per_epoch(self) -> int:
        """Number of minibatches in an epoch; 0 if the loader has no length."""
        return len(self.loader) if isinstance(self.loader, Sized) else 0

    def train(
        self, sample_flops: float, incubating: int, incubate: Callable[[Callable[[], Tensor]], None]
    ) -> float:
        """Train one epoch and return the mean loss; a non-finite loss ends the epoch and NaN is returned.

        Args:
            sample_flops: Forward FLOPs of one sample.
            incubating: Number of seeds in incubation.
            incubate: Called for every minibatch between backward and step if any seed is incubating; its
                argument is a function that returns the loss of the minibatch.
        """
        self.net.train()
        losses: list[float] = []
        self.steps = 0
        for batches in _groups(self.loader, self.accumulate):
            found = self._step(batches, incubate if incubating else None)
            losses += found
            if not math.isfinite(losses[-1]):
                self.steps = self.steps_of_epoch = max(self.steps_of_epoch, 1)
                return math.nan
            self.steps += 1
            forward = round(sum(map(size_of, batches)) * sample_flops)
            self.ledger.forward += forward
            self.ledger.backward += 2 * forward
            self.ledger.incubation += 2 * forward * incubating
            self._set_rates()
            if self.line is not None:
                expected = self.steps_of_epoch or math.ceil(self.batches_per_epoch / self.accumulate)
                steps = f"{self.steps} of {expected}" if expected else f"{self.steps}"
                text = f"epoch {self.done + 1}, step {steps}, loss {losses[-1]:.4g}"
                self.line.update(self._progress(expected), text)
            if self.budget is not None and self.ledger.charged >= self.budget:
                break
        if not losses:
            raise DataError("train_loader is empty; at least one batch is needed")
        self.steps_of_epoch = self.steps
        return sum(losses) / len(losses)

    def _step(
        self, batches: list[Any], incubate: Callable[[Callable[[], Tensor]], None] | None
    ) -> list[float]:
        """Make one optimiser step on all samples of ``batches`` and return their losses; after a non-finite
        loss, which is the last one returned, no weight changes.

        Each loss is weighted by the minibatch's share of the samples, so that the gradient is that of the
        mean over all samples.
        """
        samples, losses, shares = sum(map(size_of, batches)), [], []
        self.optimizer.zero_grad()
        for batch in batches:
            weight = size_of(batch) / samples
            share = partial(self._share, on_device(batch, self._device), weight)
            value = share()
            losses.append(float(value.detach()) / weight)
            if not math.isfinite(losses[-1]):
                return losses
            self._scaler.scale(value).backward()
            shares.append(share)
        self._scaler.unscale_(self.optimizer)
        if self.clip is not None:
            # Incubating seeds have no gradient yet, so they do not change the step of the network.
            own = [p for group in self.optimizer.param_groups for p in group["params"]]
            clip_grad_norm_(own, self.clip)
        if incubate is not None:
            for share in shares:
                incubate(share)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        if self.scheduler is not None and self.steps_scheduler:
            self.scheduler.step()
        return losses

    def _share(self, batch: Any, weight: float) -> Tensor:
        """Return the loss of a minibatch, multiplied by ``weight``."""
        with nullcontext() if self.amp is None else torch.autocast(self._device.type, self.amp):
            return loss_of(self.net, batch, self.loss) * weight

    def end_epoch(self, metric: float) -> None:
        """Count one more finished epoch, and step a scheduler of epochs; ``metric`` is read by
        ``ReduceLROnPlateau``."""
        self.done += 1
        self.steps = 0
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(metric)
        elif self.scheduler is not None and not self.steps_scheduler:
            self.scheduler.step()

    def _set_rates(self) -> None:
        if self.scheduler is not None or self.progress < 1.0 - DECAY_SHARE:
            return
        factor = wsd_factor(min(self.progress, 1.0), 1, 0)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = factor * rate

    def state(self) -> dict[str, Any]:
        return {
            "done": self.done,
            "steps_of_epoch": self.steps_of_epoch,
            "scheduler": self.scheduler and self.scheduler.state_dict(),
            "scaler": self._scaler.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.done, self.steps_of_epoch = state["done"], state["steps_of_epoch"]
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])
        self._set_rates()


def _groups(loader: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield the batches of a loader in lists of ``size`` batches; the last list may be shorter."""
    batches = iter(loader)
    while group := list(islice(batches, size)):
        yield group
