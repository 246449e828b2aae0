"""Comparison of an expansion with its alternatives: what each gains on new data and loses on old data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from esper.growth.batch_training import Loss, check_loader, endless, loss_of, on_device, untouched_streams
from esper.growth.diagnosis_report import shown
from esper.growth.race_runners import BETAS, Paired, Probe, share_of_rate
from esper.karn.notation import UNKNOWN, aligned, count, significant
from esper.leyline.errors import DataError

if TYPE_CHECKING:
    from esper.growth.expanded import Expanded

MOST_BATCHES: Final = 100
"""Largest number of batches per loader on which losses are measured."""
CLIP: Final = 1.0
"""Largest norm of a gradient in the training of an arm."""
_CHANGE: Final = ("before", "after", "change")
_HEAD: Final = ["arm", "rate", "trained", *(f"{data} {what}" for data in ("new", "old") for what in _CHANGE)]


class Change(NamedTuple):
    """Loss of the old model and of another model on the same batches, and their paired difference."""

    before: float
    after: float
    difference: Paired
    """Mean of ``after - before``, and its standard error over batches."""


class Arm(NamedTuple):
    """Model that was trained from the old model, and its losses against those of the old model."""

    name: str
    rate: float | None
    """Learning rate; None if it is not known, because the user trained the model."""
    trained: int
    """Number of parameters that trained."""
    new: Change
    old: Change


class Comparison(NamedTuple):
    """Results of all arms; standard errors are over batches, of one training each."""

    arms: tuple[Arm, ...]

    def __str__(self) -> str:
        lines = [_HEAD]
        for name, rate, trained, *changes in self.arms:
            cells = [(significant(b), significant(a), shown(gap)) for b, a, gap in changes]
            rate_cell = UNKNOWN if rate is None else f"{rate:g}"
            lines.append([name, rate_cell, count(trained), *cells[0], *cells[1]])
        return aligned(lines, left=1)


def size_of(model: nn.Module) -> int:
    """Return the number of parameters of a model."""
    return sum(p.numel() for p in model.parameters())


def probes_of(model: nn.Module, new: Iterable[Any], old: Iterable[Any], loss: Loss) -> list[Probe]:
    """Return the first batches of new and old data, on the device of the model."""
    device, probes = next(model.parameters()).device, []
    for name, loader in (("new", new), ("old", old)):
        check_loader(loader, name)
        with untouched_streams(loader):
            batches = [on_device(batch, device) for batch in islice(loader, MOST_BATCHES)]
        if not batches:
            raise DataError(f"{name} is empty; at least one batch is needed")
        probes.append(Probe(batches, loss))
    return probes


def changes(probes: Sequence[Probe], before: Sequence[Tensor], model: nn.Module) -> Iterator[Change]:
    """Yield the change of the loss on new and on old data, from the losses ``before`` to those of a model."""
    for probe, first in zip(probes, before, strict=True):
        after = probe.losses(model)
        yield Change(probe.mean(first), probe.mean(after), probe.paired(after, first))


def trained_by(arm: str, expanded: Expanded, model: nn.Module) -> list[nn.Parameter]:
    """Prepare a copy of the old model for an arm, and return the parameters that train."""
    from esper.growth.expand import expand, places_of  # noqa: PLC0415  expand.py imports this module

    kind, added, _, sample = expanded.request
    if arm == "full":
        return [p for p in model.parameters() if p.requires_grad]
    model.requires_grad_(False)
    if arm == "expanded":
        settings: dict[str, Any] = {kind: added, "where": expanded.places}
        return expand(model, sample=sample, **settings).parameters()
    if arm == "existing":
        modules = [model.get_submodule(place) for place in expanded.places]
        parameters = dict.fromkeys(p for m in modules for p in m.parameters() if p.is_floating_point())
        for parameter in parameters:
            parameter.requires_grad_(True)
        return list(parameters)
    layers: list[Any] = [model.get_submodule(layer) for layer in places_of(model, "rank", "all", 1, sample)]
    named = dict(expanded.model.named_parameters())
    per_rank = sum(layer.in_features + layer.out_features for layer in layers)
    rank = max(1, round(sum(named[name].numel() for name in expanded.new) / per_rank))
    return [p for layer in layers for p in _Lora(layer, rank).parameters()]


class _Lora(nn.Module):
    """Low-rank weights that add ``up(down(x))`` to the output of a linear layer for its input x."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        layer.register_forward_hook(self.to(layer.weight))

    def forward(self, _layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        added: Tensor = self.up(self.down(args[0]))
        return output + added


def train_arm(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    loader: Iterable[Any],
    loss: Loss,
    steps: int,
    rate: float,
) -> None:
    """Train by AdamW with clipped gradients; the learning rate rises and then falls to zero."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=BETAS, weight_decay=0.0)
    model.train()
    for step, batch in enumerate(islice(endless(loader, device, "train_loader"), steps)):
        optimizer.param_groups[0]["lr"] = rate * share_of_rate(step, steps)
        optimizer.zero_grad()
        loss_of(model, batch, loss).backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
    model.eval()
