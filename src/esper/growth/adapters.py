"""Low-rank seeds as adapters: raising their rank by hand, and export to PEFT."""

from __future__ import annotations

from numbers import Integral
from pathlib import Path
from typing import Any

from esper.growth.growth_events import GrowthEvent
from esper.growth.manual_growth import ManualGrowth
from esper.kasmina import low_rank
from esper.kasmina.compute import forward_flops
from esper.kasmina.optimizer_groups import host_parameters
from esper.kasmina.slot import notice_hooks
from esper.kasmina.transaction import all_or_nothing
from esper.leyline.errors import BlueprintError, EsperError, GrowthWarning, SlotError


class AdapterGrowth(ManualGrowth):
    """Slots in a user's network whose low-rank seeds can gain rank and be exported."""

    @all_or_nothing
    def raise_rank(self, slot: str, rank: int) -> GrowthEvent:
        """Raise the rank of the low-rank seed in ``slot`` in the middle of training.

        The output of the network does not change except for rounding. Parameters remain the same objects and
        keep their optimiser state, which is extended by zeros; the new weights train from the next step on.

        Args:
            slot: Name of the slot.
            rank: New rank: an even number larger than the present rank.

        Returns:
            Event of kind ``rank``.

        Raises:
            SlotError: The slot has no seed, or one that is not a low-rank seed.
            EsperError: ``rank`` is not an even number larger than the present rank.
            BlueprintError: All seeds together would exceed ``max_params``.
            HostError: The state of the optimiser cannot be extended.

        Example:
            >>> growth.germinate("head", "lora")
            >>> growth.raise_rank("head", 16)
        """
        self._check_unfinished("raise_rank")
        index = self._index(slot)
        self.network.follow_state()
        before = self._check_rank(index, rank)
        grafts = [self.network.slots[index].held, *self._copies.grafts(index)]
        for graft in grafts:
            self._change.afterwards(low_rank.undo_of(graft.seed))
        low_rank.raise_rank(self.network, index, int(rank))
        size = sum(p.numel() for p in self.network.seed_parameters(index))
        self.network.table.seed_params[0, index] = size
        self._checks.born(index)
        self.flops = forward_flops(self.net, self.sample)
        notice_hooks(self.network.slots[index].forwards)
        text = f"was raised from rank {before} to rank {rank} ({size:,} parameters)"
        return self._narrator.about("rank", index, text)

    def _check_rank(self, index: int, rank: Any) -> int:
        """Return the present rank of the seed in a slot; raise an error unless ``rank`` can be its new
        rank."""
        site, graft = self.network.sites[index], self.network.slots[index].graft
        if graft is None:
            raise SlotError(f"slot {site.name} holds no seed; germinate('{site.name}', 'lora') plants one")
        seed, before = self._narrator.seed(index), low_rank.rank_of(graft.seed)
        if not before:
            raise SlotError(f"{seed} has no rank; only a low-rank seed (lora, lora_large) can be raised")
        is_number = isinstance(rank, Integral) and not isinstance(rank, bool)
        if not is_number or rank <= before or rank % 2:
            raise EsperError(
                f"rank is {rank!r}; {seed} has rank {before}, and can be raised to any larger even number"
            )
        most, used = self.network.max_params, self.network.grown_params()
        more = 2 * site.width * (rank - before)
        if most is not None and used + more > most:
            raise BlueprintError(
                f"rank {rank} needs {more:,} more parameters, and of max_params={most:,} only"
                f" {most - used:,} are left; choose a lower rank"
            )
        return before

    @all_or_nothing
    def save_adapter(self, folder: Path | str) -> None:
        """Write all seeds as a LoRA adapter of PEFT; ``PeftModel.from_pretrained(base, folder)`` loads it.

        Every seed that takes part in the forward pass must be a low-rank seed directly on an ``nn.Linear``,
        blended by addition. Seeds in incubation are left out. A warning is issued if the optimiser also
        trains layers of the network itself, because the adapter does not store their change.

        Args:
            folder: Folder to write; missing parents are made, and an older adapter in it is replaced.

        Raises:
            HostError: A seed cannot be part of an adapter, or there is none.
            SaveError: The folder could not be written, or it holds other files; it is unchanged.

        Example:
            >>> growth.save_adapter("adapter")
            >>> model = peft.PeftModel.from_pretrained(base, "adapter")
        """
        self._check_unfinished("save_adapter")
        from esper.kasmina import peft_adapter  # noqa: PLC0415  needed for files only

        self.network.follow_state()
        peft_adapter.save(self.network, Path(folder))
        trained = self._trained_layers()
        if trained:
            GrowthWarning.issue(
                f"the optimiser also trains {len(trained)} parameters of the network itself, and the adapter"
                f" does not store their change; load '{folder}' into a network with the present weights"
            )

    def _trained_layers(self) -> list[object]:
        """Return the parameters of the network, without seeds, that the optimiser trains."""
        optimisers = self.network.groups.optimisers if self.network.groups else ()
        held = {id(p) for each in optimisers for group in each.param_groups for p in group["params"]}
        return [p for p in host_parameters(self.net) if p.requires_grad and id(p) in held]
