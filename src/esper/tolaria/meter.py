"""What an episode spends: the FLOPs of every part that took part in a step, by purpose.

A step's cost is the sum of its parts: segments of the host, and seeds.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.kasmina.blueprints import blueprint_at
from esper.kasmina.model import MorphogeneticModel, shadow_size
from esper.kasmina.streams import TorchStream
from esper.leyline.stages import Stage
from esper.tolaria.flops import PartCost, count_part


class _SeedPart(nn.Module):
    """A slot's seed with its gate, for counting."""

    def __init__(self, seed: nn.Module, gate: nn.Module | None) -> None:
        super().__init__()
        self.seed, self.gate = seed, gate

    def forward(self, h: Tensor) -> Tensor:
        delta: Tensor = self.seed(h)
        return delta if self.gate is None else self.gate(h) * delta


@dataclass(slots=True)
class FlopLedger:
    """Compute of one episode by purpose; ``pruned_seeds`` is the part of it spent on removed seeds."""

    forward: int = 0
    backward: int = 0
    incubation: int = 0
    validation: int = 0
    counterfactual: int = 0
    pruned_seeds: int = 0

    @property
    def charged(self) -> int:
        """What a budget pays for: everything but the one validation a step, which is an instrument."""
        return self.total - self.validation

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.incubation + self.validation + self.counterfactual


@dataclass
class FlopMeter:
    """Counts the parts of one model and adds up what each epoch spends."""

    model: MorphogeneticModel
    sample: Tensor
    """One input of the host, without the batch."""
    ledger: FlopLedger = field(default_factory=FlopLedger)

    def __post_init__(self) -> None:
        host, shape = self.model.host, tuple(self.sample.shape)
        first, *rest = host.segments
        parts = zip(rest, host.feature_shapes, strict=True)
        self._segments = [count_part(first, shape, self.sample.dtype)]
        self._segments += [count_part(part, own) for part, own in parts]
        self._seeds: dict[int, PartCost] = {}
        self._spent: dict[int, int] = {}
        self._candidates: dict[int, list[int]] = {}

    def germinated(self, slot: int) -> None:
        """Count the seed that was just attached."""
        seed_slot = self.model.slot(slot)
        if seed_slot.seed is None:
            raise RuntimeError(f"slot {seed_slot.slot_id} is empty")
        part = _SeedPart(seed_slot.seed, seed_slot.gate)
        self._seeds[slot] = count_part(part, self.model.host.feature_shapes[slot])
        self._spent[slot] = 0

    def removed(self, slot: int) -> None:
        """Count everything spent on a seed as spent on a pruned one."""
        self.ledger.pruned_seeds += self._spent.pop(slot)
        del self._seeds[slot]

    def per_sample(self) -> tuple[int, int]:
        """FLOPs of one sample's forward through the bare host, and through the network as it stands."""
        host = sum(part.forward for part in self._segments)
        return host, host + sum(self._seeds[slot].forward for slot in self.model.blended)

    def follow_model(self, stayed: Sequence[int]) -> None:
        """The model went back to an earlier state, in which the seeds of the slots ``stayed`` are the same.

        Compute is not undone. What went into seeds that are gone counts as spent on pruned ones.
        """
        kept = {slot: spent for slot, spent in self._spent.items() if slot in stayed}
        self.ledger.pruned_seeds += sum(self._spent.values()) - sum(kept.values())
        occupied = [i for i in range(len(self.model.slots)) if self.model.slot(i).seed is not None]
        self._restore_spent({slot: kept.get(slot, 0) for slot in occupied})

    def _restore_spent(self, spent: dict[int, int]) -> None:
        """Return to what was ``spent`` on each seed, counting those now attached."""
        self._seeds = {}
        for slot in spent:
            self.germinated(slot)
        self._spent = dict(spent)

    def state(self) -> dict[str, dict[Any, int]]:
        """The ledger, and what was spent on each seed."""
        return {"ledger": asdict(self.ledger), "spent": dict(self._spent)}

    def load_state(self, state: dict[str, dict[Any, int]]) -> None:
        """Return to ``state``; the model has returned to its seeds already."""
        self.ledger = FlopLedger(**state["ledger"])
        self._restore_spent(state["spent"])

    def minibatch(self, batch: int) -> int:
        """What one minibatch of ``batch`` samples costs with the network as it stands."""
        return sum(self._passes(batch)) + sum(self._incubation(slot, batch) for slot in self.model.incubating)

    def candidate_cost(self, batch: int) -> float:
        """What a seed that can be planted would add to a minibatch, on average, as a share of its cost now.

        NaN where nothing can be planted.
        """
        table = self.model.table
        free = np.flatnonzero(table.enabled[0] & (table.stage[0] == Stage.DORMANT)).tolist()
        costs = [cost for slot in free for cost in self._costs_of_seeds(slot)]
        return batch * fmean(costs) / self.minibatch(batch) if costs else math.nan

    def _costs_of_seeds(self, slot: int) -> list[int]:
        """Forward and backward of every blueprint that fits ``slot``, built once for counting."""
        if slot not in self._candidates:
            space, place = self.model.action_space, self.model.slot(slot)
            self._candidates[slot] = costs = []
            for index in space.blueprints:
                spec = blueprint_at(index, self.model.host.topology)
                if (slot, index) not in space.unfit:
                    with TorchStream(0):  # first weights are drawn, and forgotten
                        seed = spec.build(copy.deepcopy(place.original[0]) if spec.copies else place.width)
                    cost = count_part(seed, self.model.host.feature_shapes[slot])
                    costs.append(cost.forward + cost.to_all)
        return self._candidates[slot]

    def trained(self, batch: int) -> None:
        """Count one minibatch of ``batch`` samples with the network as it stands."""
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
        if self.model.rules.incubation == "straight_through":
            return batch * (seed.forward + seed.to_all)
        downstream = [self._seeds[other] for other in self.model.blended if other > slot]
        rest = sum(part.forward + part.to_input for part in self._segments[slot + 1 :] + downstream)
        return shadow_size(batch) * (seed.forward + seed.to_all + rest)

    def validated(self, samples: int, switched: Sequence[int], configurations: NDArray[np.bool_]) -> None:
        """Count one validation of ``samples`` with ``switched`` in ``configurations``.

        By prefix tree. One all-on forward counts as validation, what goes beyond it as counterfactual.
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
        """FLOPs of the host's segments, and how often each blended seed runs: once for every prefix."""
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
