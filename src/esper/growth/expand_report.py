"""Measurements of an expansion: gain on new data and loss on old data, and a comparison with alternatives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn

from esper.growth.batch_training import Loss, check_loader, endless, loss_of, on_device, untouched_streams
from esper.growth.diagnosis_report import shown
from esper.growth.expand import expand, places_of
from esper.growth.race_runners import BETAS, Paired, Probe, share_of_rate
from esper.karn.notation import aligned, count, significant
from esper.leyline.errors import DataError, EsperError, UnknownNameError

if TYPE_CHECKING:
    from esper.growth.expanded import Expanded

MOST_BATCHES: Final = 100
"""Largest number of batches per loader on which losses are measured."""
CLIP: Final = 1.0
"""Largest norm of a gradient in the training of an arm."""
ARMS: Final = ("expanded", "existing", "lora", "full")


class Change(NamedTuple):
    """Loss of the old model and of another model on the same batches, and their paired difference."""

    before: float
    after: float
    difference: Paired
    """Mean of ``after - before``, and its standard error over batches."""


class ExpansionReport(NamedTuple):
    """Losses on new and old data without and with an expansion."""

    new: Change
    old: Change

    def __str__(self) -> str:
        head = ("data", "without", "with", "difference")
        rows = [(name, *_cells(change)) for name, change in self._asdict().items()]
        return aligned([head, *rows], left=1)


class Arm(NamedTuple):
    """Result of training one arm of a comparison."""

    name: str
    rate: float
    trained: int
    """Number of parameters that trained."""
    new: Change
    old: Change


class Comparison(NamedTuple):
    """Results of all arms, each against the old model; differences have standard errors over batches, of one
    training each."""

    arms: tuple[Arm, ...]
    steps: int

    def __str__(self) -> str:
        head = ("arm", "rate", "trained", "new before", "new after", "difference")
        head += ("old before", "old after", "difference")
        rows = [
            (arm.name, f"{arm.rate:g}", count(arm.trained), *_cells(arm.new), *_cells(arm.old))
            for arm in self.arms
        ]
        return f"{aligned([head, *rows], left=1)}\n{self.steps} steps per arm, one training each"


def _cells(change: Change) -> tuple[str, str, str]:
    return significant(change.before), significant(change.after), shown(change.difference)


def report_of(expanded: Expanded, new: Iterable[Any], old: Iterable[Any], loss: Loss) -> ExpansionReport:
    """Measure an expansion; see ``Expanded.report``."""
    probes = _probes(expanded.model, new, old, loss)
    after = [probe.losses(expanded.model) for probe in probes]
    with expanded.original():
        before = [probe.losses(expanded.model) for probe in probes]
    return ExpansionReport(*map(_change, probes, before, after))


def comparison_of(
    expanded: Expanded,
    train_loader: Iterable[Any],
    new: Iterable[Any],
    old: Iterable[Any],
    loss: Loss,
    steps: int,
    rates: Mapping[str, Sequence[float]],
) -> Comparison:
    """Train all arms from the old model; see ``Expanded.compare``."""
    for name in rates:
        if name not in ARMS:
            raise UnknownNameError("arm", name, ARMS)
    if steps < 1:
        raise EsperError(f"steps is {steps}; it must be 1 or more")
    check_loader(train_loader, "train_loader")
    source = expanded.old_model()
    layers: Sequence[str] = ()
    if "lora" in rates:
        layers = places_of(source, "rank", "all", 1, expanded.request.sample)
    probes = _probes(source, new, old, loss)
    before = [probe.losses(source) for probe in probes]
    arms = []
    for name, tried in rates.items():
        for rate in tried:
            model = expanded.old_model()
            # Every arm reads the same batches and starts from the same random state.
            with untouched_streams(train_loader):
                parameters = _trained(expanded, name, model, layers)
                train_arm(model, parameters, train_loader, loss, steps, rate)
            changes = map(_change, probes, before, [probe.losses(model) for probe in probes])
            arms.append(Arm(name, rate, sum(p.numel() for p in parameters), *changes))
    return Comparison(tuple(arms), steps)


def _probes(model: nn.Module, new: Iterable[Any], old: Iterable[Any], loss: Loss) -> list[Probe]:
    device, probes = next(model.parameters()).device, []
    for name, loader in (("new", new), ("old", old)):
        check_loader(loader, name)
        with untouched_streams(loader):
            batches = [on_device(batch, device) for batch in islice(loader, MOST_BATCHES)]
        if not batches:
            raise DataError(f"{name} is empty; at least one batch is needed")
        probes.append(Probe(batches, loss))
    return probes


def _change(probe: Probe, before: torch.Tensor, after: torch.Tensor) -> Change:
    return Change(probe.mean(before), probe.mean(after), probe.paired(after, before))


def _trained(expanded: Expanded, arm: str, model: nn.Module, layers: Sequence[str]) -> list[nn.Parameter]:
    """Prepare a copy of the old model for an arm, and return the parameters that train."""
    kind, added, _, sample = expanded.request
    if arm == "full":
        return [p for p in model.parameters() if p.requires_grad]
    if arm == "existing":
        model.requires_grad_(False)
        modules = [model.get_submodule(place) for place in expanded.places]
        parameters = {p for module in modules for p in module.parameters() if p.is_floating_point()}
        return [p.requires_grad_(True) for p in model.parameters() if p in parameters]
    if arm == "expanded":
        return expand(model, sample=sample, where=expanded.places, **{kind: added}).parameters()
    linear = [model.requires_grad_(False).get_submodule(layer) for layer in layers]
    size = sum(p.numel() for p in expanded.new_parameters())
    rank = max(1, round(size / sum(sum(layer.weight.shape) for layer in linear)))  # type: ignore[arg-type]
    adapters = [_Lora(layer, rank) for layer in linear]
    return [p for adapter in adapters for p in adapter.parameters()]


class _Lora(nn.Module):
    """Low-rank weights that add ``up(down(x))`` to the output of a linear layer for its input x; the hook is
    attached at once."""

    def __init__(self, layer: Any, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.to(layer.weight)
        layer.register_forward_hook(self)

    def forward(self, _layer: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + self.up(self.down(args[0]))


def train_arm(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    loader: Iterable[Any],
    loss: Loss,
    steps: int,
    rate: float,
) -> None:
    """Train by AdamW with clipped gradients; the rate rises and then falls to zero."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=BETAS, weight_decay=0.0)
    model.train()
    for step, batch in enumerate(islice(endless(loader, device, "train_loader"), steps)):
        for group in optimizer.param_groups:
            group["lr"] = rate * share_of_rate(step, steps)
        optimizer.zero_grad()
        loss_of(model, batch, loss).backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
    model.eval()
