"""FLOPs of a growing network and its modules, and a ledger of FLOPs and seconds by purpose, such as training
or validation.

FLOPs are multiplications and additions of convolutions and matrix products, counted by torch's FLOP counter
while a module runs. FLOPs of normalisation, activations and pooling are not counted."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from esper.kasmina.birth import BlockCall, captured_call
from esper.kasmina.dry_run import call, layer_by_layer, untouched
from esper.kasmina.graft import BlockGraft, Graft, SideGraft, change, shadow_size
from esper.kasmina.network import MorphogeneticModel
from esper.kasmina.random_streams import TorchStream
from esper.kasmina.seed_description import description_of
from esper.kasmina.widening import WidthGraft
from esper.leyline import Stage, Style

_BATCH = 2


def flop_counter() -> FlopCounterMode:
    """Return torch's FLOP counter, with correct formulas for grouped convolutions and for attention on the
    CPU."""
    aten = torch.ops.aten
    formulas = {
        aten.convolution_backward: _convolution_backward,
        aten._scaled_dot_product_flash_attention_for_cpu: _of_first(3, sdpa_flop_count),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _of_first(4, sdpa_backward_flop_count),
    }
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    counter.mod_tracker = _OneModule()  # type: ignore[assignment]  # it has what the counter reads
    return counter


class _OneModule(nullcontext[None]):
    """Replacement of torch's module tracker, for totals only. Torch's tracker fails without gradients on
    views of parameters, as in DeBERTa-v2."""

    parents = frozenset({"Global"})


def _convolution_backward(
    grad_output: Sequence[int], x: Sequence[int], weight: Sequence[int], *settings: Any, **_: Any
) -> int:
    """Return the FLOPs of a convolution's backward pass; the gradients of input and weight each cost as much
    as one forward pass.

    The shape of ``weight [out, in / groups, …]`` already contains the division by the number of groups.
    Torch's own formula ignores the groups in the gradient of the weight, so its result is ``groups`` times
    too large.
    """
    *_before, transposed, _output_padding, _groups, wanted = settings
    positions = math.prod((x if transposed else grad_output)[2:])
    return sum(wanted[:2]) * 2 * x[0] * positions * math.prod(weight)


def _of_first(shapes: int, formula: Callable[..., int]) -> Callable[..., int]:
    """Return torch's FLOP formula for attention, which torch itself applies on CUDA only; causal masks are
    ignored."""
    return lambda *arguments, **_: int(formula(*arguments[:shapes]))


class PartCost(NamedTuple):
    """FLOPs per sample of one module: a seed, or a part of the host between two slots."""

    forward: int
    to_all: int
    """FLOPs of a backward pass that computes the gradients of parameters and input."""
    to_parameters: int
    """FLOPs of a backward pass that computes the gradients of parameters only."""
    to_input: int
    """FLOPs of a backward pass that computes the gradient of the input only."""


_counted: dict[tuple[str, tuple[int, ...], tuple[torch.Size, ...]], PartCost] = {}


def count_part(part: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> PartCost:
    """Return the FLOPs of a module on a sample of ``shape``; modules with equal repr are counted once per
    process."""
    key = (f"{type(part).__module__}.{part!r}", shape, tuple(p.shape for p in part.parameters()))
    if key not in _counted:
        _counted[key] = _count(part, shape, dtype)
    return _counted[key]


def _count(part: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> PartCost:
    """Count the FLOPs of a copy of the module, because a forward pass may change the module's running
    statistics."""
    part = copy.deepcopy(part).cpu()
    parameters = [p for p in part.parameters() if p.requires_grad]

    def count(into_parameters: bool, into_input: bool) -> tuple[int, int]:
        into_input &= dtype.is_floating_point
        for parameter in parameters:
            parameter.requires_grad_(into_parameters)
        sample = torch.ones((_BATCH, *shape), dtype=dtype, requires_grad=into_input)
        wanted: list[Tensor] = parameters * into_parameters + [sample] * into_input
        with flop_counter() as forward, torch.enable_grad():
            output = part(sample)
        if not wanted or not output.requires_grad:
            return int(forward.get_total_flops()) // _BATCH, 0
        with flop_counter() as backward:
            torch.autograd.grad(output.sum(), wanted, allow_unused=True)
        return int(forward.get_total_flops()) // _BATCH, int(backward.get_total_flops()) // _BATCH

    with TorchStream(0):  # A separate stream keeps dropout from advancing the caller's random state.
        forward, to_all = count(True, True)
        return PartCost(forward, to_all, count(True, False)[1], count(False, True)[1])


def forward_flops(net: nn.Module, sample: Any) -> float:
    """Return the FLOPs of one forward pass of the network on a sample; at least 1."""
    with untouched(net, training=False), flop_counter() as counter, layer_by_layer(), torch.no_grad():
        call(net, sample)
    return float(max(counter.get_total_flops(), 1))


def call_flops(block: nn.Module, called: BlockCall) -> float:
    """Return the FLOPs of one forward pass of a block with the given arguments."""
    args, kwargs = copy.deepcopy(called)
    with untouched(block, training=False), flop_counter() as counter, layer_by_layer(), torch.no_grad():
        block(*args, **kwargs)
    return float(counter.get_total_flops())


class _BlockPart(nn.Module):
    """Block with the other arguments that the network passes to it, used to count FLOPs."""

    def __init__(self, model: MorphogeneticModel, slot: int, graft: BlockGraft, sample: Tensor) -> None:
        super().__init__()
        source = model.slots[slot].place.block
        self.block, self.features, self.site = graft.seed, graft.argument, graft.site
        self.called = captured_call(model.host, source, sample.expand(_BATCH, *sample.shape).contiguous())

    def forward(self, h: Tensor) -> Tensor:
        h = h.transpose(*self.site.swap) if self.site.swap else h
        args, kwargs = self.features.replaced(*copy.deepcopy(self.called), h)
        return self.site.output.features(self.block(*args, **kwargs))


class _SeedPart(nn.Module):
    """Module of a seed with its gate, used to count FLOPs."""

    def __init__(self, seed: nn.Module, gate: nn.Module | None) -> None:
        super().__init__()
        self.seed, self.gate = seed, gate

    def forward(self, h: Tensor) -> Tensor:
        delta: Tensor = self.seed(h)
        return delta if self.gate is None else self.gate(h) * delta


class _UnitsPart(nn.Module):
    """Layers of new hidden units, used to count FLOPs."""

    def __init__(self, graft: WidthGraft) -> None:
        super().__init__()
        assert graft.site.pair is not None
        self.inner, self.outer = graft.seed.inner, graft.seed.outer
        shape = list(graft.site.pair.hidden_shape[1:])
        shape[0 if isinstance(self.outer, nn.Conv2d) else -1] = graft.count
        self.shape = shape

    def extra_repr(self) -> str:
        return f"{self.shape}"

    def forward(self, x: Tensor) -> Tensor:
        units = torch.stack([layer(x).mean() for layer in self.inner]).sum()
        return self.outer(units.expand(len(x), *self.shape))


def count_units(graft: WidthGraft) -> PartCost:
    """Return the FLOPs of new hidden units for one sample."""
    assert graft.site.pair is not None
    rows, *shape = graft.site.pair.shape
    each = count_part(_UnitsPart(graft), tuple(shape))
    return PartCost(*(flops * rows // graft.site.shape[0] for flops in each))


@dataclass(slots=True)
class ComputeLedger:
    """FLOPs and seconds of one training by purpose, such as forward passes, validation and races."""

    forward: int = 0
    backward: int = 0
    incubation: int = 0
    validation: int = 0
    counterfactual: int = 0
    race: int = 0
    pruned_seeds: int = 0
    """FLOPs spent on seeds that were removed later; the other fields of the ledger include these FLOPs
    too."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock seconds spent on ``train``, ``measure`` and ``race``, if measured."""

    @property
    def charged(self) -> int:
        """FLOPs that count against a budget: all except those of the validation after each epoch."""
        return self.total - self.validation

    @property
    def total(self) -> int:
        training = self.forward + self.backward + self.incubation
        return training + self.validation + self.counterfactual + self.race

    def flops(self) -> dict[str, int]:
        """Return the FLOPs by purpose, such as ``forward``, ``validation`` and ``race``."""
        return {name: round(value) for name, value in asdict(self).items() if name != "seconds"}

    def charge(self, **flops: float) -> None:
        """Add FLOPs to the named fields of the ledger, such as ``validation``."""
        for purpose, amount in flops.items():
            setattr(self, purpose, getattr(self, purpose) + round(amount))

    @contextmanager
    def timed(self, purpose: str) -> Iterator[None]:
        """Add the wall-clock seconds spent inside the context to the entry ``purpose``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            self.seconds[purpose] = self.seconds.get(purpose, 0.0) + spent


@dataclass
class FlopMeter:
    """Counts the FLOPs of every seed and of every part of the host between slots, and adds the FLOPs of
    training to a ledger."""

    model: MorphogeneticModel
    sample: Tensor
    """Input of the host without the batch axis; only shape and dtype are used."""
    ledger: ComputeLedger = field(default_factory=ComputeLedger)

    def __post_init__(self) -> None:
        shape = tuple(self.sample.shape)
        first, *rest = self.model.segments or [self.model.host]
        parts = zip(rest, self.model.sites, strict=True) if rest else ()
        # Count the host without seeds; the FLOPs of a seed are counted in ``germinated``.
        with self.model.taking_part(self.model.without(*self.model.blended)):
            self._segments = [count_part(first, shape, self.sample.dtype)]
            self._segments += [count_part(part, site.shape[1:]) for part, site in parts]
        self._seeds: dict[int, PartCost] = {}
        self._spent: dict[int, int] = {}
        self._candidates: dict[int, list[int]] = {}

    def germinated(self, slot: int) -> None:
        """Count the FLOPs of a seed that was just attached."""
        self._seeds[slot] = self._count_graft(slot, self.model.slots[slot].held)
        self._spent[slot] = 0

    def _count_graft(self, slot: int, graft: Graft) -> PartCost:
        if isinstance(graft, WidthGraft):
            return count_units(graft)
        part: nn.Module = _SeedPart(graft.seed, graft.gate)
        if isinstance(graft, BlockGraft):
            part = _BlockPart(self.model, slot, graft, self.sample)
        each = count_part(part, graft.site.shape[1:])
        return PartCost(*(round(graft.site.times * flops) for flops in each))

    def removed(self, slot: int) -> None:
        """Add all FLOPs spent on the removed seed of ``slot`` to the ledger's FLOPs of pruned seeds."""
        self.ledger.pruned_seeds += self._spent.pop(slot)
        del self._seeds[slot]

    def per_sample(self) -> tuple[int, int]:
        """Return the forward FLOPs per sample of the host alone and of the present network."""
        host = sum(part.forward for part in self._segments)
        return host, host + sum(self._seeds[slot].forward for slot in self.model.blended)

    def follow_model(self, stayed: Sequence[int]) -> None:
        """Count the FLOPs of the present seeds again after a rollback; ``stayed`` are the slots whose seed
        the rollback did not change. FLOPs of seeds that it removed count as those of pruned seeds."""
        kept = {slot: spent for slot, spent in self._spent.items() if slot in stayed}
        self.ledger.pruned_seeds += sum(self._spent.values()) - sum(kept.values())
        occupied = [i for i, slot in enumerate(self.model.slots) if slot.seed is not None]
        self._restore_spent({slot: kept.get(slot, 0) for slot in occupied})

    def _restore_spent(self, spent: dict[int, int]) -> None:
        """Restore the FLOPs ``spent`` on each seed, and count the FLOPs per sample of the attached seeds."""
        self._seeds = {}
        for slot in spent:
            self.germinated(slot)
        self._spent = dict(spent)

    def state(self) -> dict[str, dict[Any, Any]]:
        """Return the ledger and the FLOPs spent on each seed."""
        return {"ledger": asdict(self.ledger), "spent": dict(self._spent)}

    def load_state(self, state: dict[str, dict[Any, Any]]) -> None:
        """Restore the ledger and the FLOPs spent on each seed; the seeds must be attached already."""
        self.ledger = ComputeLedger(**state["ledger"])
        self._restore_spent(state["spent"])

    def minibatch(self, batch: int) -> int:
        """Return the FLOPs of training the present network on one minibatch of ``batch`` samples."""
        return sum(self._passes(batch)) + sum(self._incubation(slot, batch) for slot in self.model.incubating)

    def candidate_cost(self, batch: int) -> float:
        """Return the mean compute of training the seeds that can be planted, divided by that of training the
        present network; NaN if no seed can be planted."""
        table = self.model.table
        free = np.flatnonzero(table.enabled[0] & (table.stage[0] == Stage.DORMANT)).tolist()
        costs = [cost for slot in free for cost in self._costs_of_seeds(slot)]
        return batch * fmean(costs) / self.minibatch(batch) if costs else math.nan

    def _costs_of_seeds(self, slot: int) -> list[int]:
        """Return the forward plus backward FLOPs of a seed of every blueprint that fits ``slot``."""
        if slot not in self._candidates:
            space, place = self.model.action_space, self.model.slots[slot]
            self._candidates[slot] = costs = []
            for index in space.blueprints:
                if (slot, index) not in space.unfit:
                    wanted = description_of(self.model.blueprint(slot, index).name, Style.LINEAR_ADD)
                    cost = self._count_graft(slot, place.rebuilt(wanted, torch.empty(0)))
                    costs.append(cost.forward + cost.to_all)
        return self._candidates[slot]

    def trained(self, batch: int) -> None:
        """Add the FLOPs of training on one minibatch of ``batch`` samples to the ledger."""
        forward, backward = self._passes(batch)
        self.ledger.forward += forward
        self.ledger.backward += backward
        for slot in self.model.blended:
            self._spent[slot] += batch * (self._seeds[slot].forward + self._seeds[slot].to_all)
        for slot in self.model.incubating:
            cost = self._incubation(slot, batch)
            self.ledger.incubation += cost
            self._spent[slot] += cost

    def _passes(self, batch: int) -> tuple[int, int]:
        first, *rest = self._segments
        others = rest + [self._seeds[slot] for slot in self.model.blended]
        forward = first.forward + sum(part.forward for part in others)
        return batch * forward, batch * (first.to_parameters + sum(part.to_all for part in others))

    def _incubation(self, slot: int, batch: int) -> int:
        seed = self._seeds[slot]
        # ``change`` also computes the gradient of the seed's input, which incubation does not need.
        graft = self.model.slots[slot].held
        is_whole = isinstance(graft, SideGraft) and graft.change is change
        own = seed.to_all if is_whole else seed.to_parameters
        segmented = self.model.segments is not None
        others = [self._seeds[s] for s in self.model.blended if s > slot or not segmented]
        parts = (self._segments[slot + 1 :] if segmented else self._segments) + others
        rest = sum(part.forward + part.to_input for part in parts)
        return shadow_size(batch) * (seed.forward + own + rest)

    def validated(self, samples: int, switched: Sequence[int], configurations: NDArray[np.bool_]) -> None:
        """Add the FLOPs of one validation on ``samples`` samples to the ledger; each row of
        ``configurations`` has one on/off state for every slot in ``switched``.

        One forward pass of the whole network counts as validation, all other forward passes as
        counterfactual.
        """
        plain = self.per_sample()[1]
        spent, by_slot = self._tree_runs(switched, configurations)
        for slot, times in by_slot.items():
            cost = times * self._seeds[slot].forward
            self._spent[slot] += samples * cost
            spent += cost
        self.ledger.validation += samples * plain
        self.ledger.counterfactual += samples * (spent - plain)

    def _tree_runs(
        self, switched: Sequence[int], configurations: NDArray[np.bool_]
    ) -> tuple[int, dict[int, int]]:
        """Return the FLOPs of the host over all on/off configurations, and the number of forward passes of
        each blended seed."""
        if self.model.segments is None:  # A user's network has one forward pass per configuration.
            runs = {s: len(configurations) for s in self.model.blended if s not in switched}
            runs |= {s: int(configurations[:, i].sum()) for i, s in enumerate(switched)}
            return len(configurations) * self._segments[0].forward, runs
        copies, depth, spent, by_slot = 1, 0, self._segments[0].forward, {}
        for slot, segment in enumerate(self._segments[1:]):
            if slot in self.model.blended:
                by_slot[slot] = copies
                if slot in switched:
                    depth += 1
                    prefixes = np.unique(configurations[:, :depth], axis=0)
                    by_slot[slot], copies = int(prefixes[:, -1].sum()), len(prefixes)
            spent += copies * segment.forward
        return spent, by_slot
