"""Network that can grow: any ``nn.Module`` with its slots and the slot table of these slots.

Stages and alphas of seeds are stored in the slot table. Only ``sync`` copies stages and alphas from the slot
table to the modules, where they determine how seeds take part in forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.kasmina import lifecycle, network_state
from esper.kasmina.birth import Births, BlockCall, captured_call, is_offered, zero_outputs
from esper.kasmina.blueprints import BlueprintSpec, blueprint_named, blueprint_names, specs_for
from esper.kasmina.blueprints.stack import Stack
from esper.kasmina.edits import Argument
from esper.kasmina.feature_output import Output
from esper.kasmina.graft import Graft, Participation, SideGraft
from esper.kasmina.host import Host
from esper.kasmina.optimizer_groups import OptimizerGroups, host_parameters
from esper.kasmina.random_streams import TorchStream
from esper.kasmina.renewal import renew_blocks
from esper.kasmina.seed_description import described
from esper.kasmina.sites import Site
from esper.kasmina.slot import SeedSlot, attach, check_compatible
from esper.leyline import NUM_BLUEPRINTS, BlueprintError, SlotConfig, SlotTable, Stage, derive_seed
from esper.leyline.rules import ActionSpace, LifecycleRules

StreamFactory = Callable[[str], TorchStream | None]
"""Function that returns the random stream of a slot by its id; None for torch's global generator."""


def slot_streams(rng_seed: int) -> StreamFactory:
    """Return a function that derives the random stream of a slot from ``rng_seed`` and the slot id."""
    return lambda slot_id: TorchStream(derive_seed(rng_seed, "slot", slot_id))


class Follower(Protocol):
    """Object that updates a copy or a wrapper of a network when the network gains or loses a seed."""

    def seed_planted(self, slot: int, graft: Graft) -> None:
        """Update the copy or wrapper of the network after a seed was added to the network."""

    def seed_removed(self, slot: int, graft: Graft) -> None:
        """Update the copy or wrapper of the network after a seed was removed from the network."""

    def rank_raised(self, slot: int, graft: Graft) -> None:
        """Update the copy or wrapper of the network after the rank of a seed was raised."""


class MorphogeneticModel(nn.Module):
    """Network with slots; before a seed is planted its outputs equal those of the host, bit for bit.

    Args:
        host: Network to grow.
        rules: Lifecycle rules; default rules unless given.
        sites: Positions of the slots; the sites of a built-in host unless given.
        table: Slot table of one environment; an empty table unless given.
        streams: Function that returns the random stream of a slot; streams derived from rng seed 0 unless
            given.
        token: Identifier shared by all deep copies of the network.
        sample: Input that the network is called with; needed to plant a copied block that starts without
            effect.

    Raises:
        HostError: The network already has slots.
    """

    def __init__(
        self,
        host: nn.Module,
        rules: LifecycleRules | None = None,
        *,
        sites: Sequence[Site] | None = None,
        table: SlotTable | None = None,
        streams: StreamFactory | None = None,
        token: str = "",
        sample: Any = None,
    ) -> None:
        super().__init__()
        self._host_parameters = list(host.parameters())
        self.host = host
        self.rules = rules or LifecycleRules()
        self.sites = list(host.sites if sites is None and isinstance(host, Host) else sites or ())
        self.slot_config = SlotConfig(tuple(site.name for site in self.sites))
        self.table = table if table is not None else SlotTable.empty(1, len(self.sites))
        self.sample = sample
        self.births = Births()
        """How copied blocks start unless ``germinate`` is told otherwise."""
        self.max_params: int | None = None
        """Largest number of parameters that all seeds together may have; None for no limit."""
        self.groups: OptimizerGroups | None = None
        self.followers: list[Follower] = []
        make_stream = streams or slot_streams(0)
        self.slots = [SeedSlot(site, host, make_stream(site.name), token) for site in self.sites]
        attach(host, self.slots)
        self._known: dict[int, Graft] = {}
        """Grafts whose parameters were already added to the optimisers and to copies of the network, by slot
        index."""
        self.sync()

    @property
    def segments(self) -> nn.ModuleList | None:
        """Modules of a built-in host that run in sequence, one before each slot and one after the last slot;
        None for any other network."""
        return self.host.segments if isinstance(self.host, Host) else None

    # --- forward passes -----------------------------------------------------------------------

    def forward(self, x: Tensor, start: int | None = None) -> Tensor:
        """Return the output for the input ``x``; if ``start`` is given, ``x`` are the features at slot
        ``start`` of a built-in host."""
        if start is None:
            return self.host(x)
        assert self.segments is not None, "only a segmented host can be entered at a slot"
        graft = self.slots[start].held
        assert isinstance(graft, SideGraft), "a built-in host has side modules only"
        h = graft.blended(x)
        for segment in self.segments[start + 1 :]:
            h = segment(h)
        return h

    @contextmanager
    def taking_part(self, parts: Sequence[Participation]) -> Iterator[None]:
        """Set how the seed of every slot takes part in forward passes inside the context."""
        before = [(slot, slot.graft.participation) for slot in self.slots if slot.graft is not None]
        for slot, part in zip(self.slots, parts, strict=True):
            slot.take_part(part)
        try:
            yield
        finally:
            for slot, part in before:
                slot.take_part(part)

    def without(self, *off: int) -> list[Participation]:
        """Return one ``Participation`` per slot, for a forward pass in which the seeds of the slots ``off``
        are switched off.
        """
        return [Participation(active=i in self.blended and i not in off) for i in range(len(self.slots))]

    def captured(self, slot: int) -> Tensor:
        """Return the features that the last training pass stored for the incubating seed at ``slot``."""
        graft = self.slots[slot].graft
        if graft is None or graft.features is None:
            raise RuntimeError(f"no pass has kept features for slot {self.slot_config.slot_ids[slot]}")
        return graft.features

    # --- slot table -----------------------------------------------------------------------------

    def sync(self) -> None:
        """Copy stages and alphas from the slot table to the modules of all seeds."""
        stage, alpha, taking_part = self.table.stage[0], self.table.alpha[0], self.table.in_forward[0]
        self.incubating = [i for i in range(len(self.slots)) if stage[i] == Stage.TRAINING]
        """Indices of the slots whose seed is in incubation: it learns without changing the output."""
        self.blended = [i for i in range(len(self.slots)) if taking_part[i]]
        """Indices of the slots whose seed is active in the forward pass."""
        segmented = self.segments is not None
        for index, slot in enumerate(self.slots):
            if slot.graft is not None:
                slot.graft.set_alpha(float(alpha[index]))
                slot.graft.features = None
                taps = segmented and index in self.incubating
                slot.graft.take_part(Participation(active=index in self.blended, taps=taps))
        # Parameters of seeds are listed here in advance, because iterating over modules at every minibatch
        # would take as long as a convolution.
        self._seed_parameters = [slot.seed_parameters() for slot in self.slots]

    def slot(self, index: int) -> SeedSlot:
        """Return the slot module with the slot index ``index``."""
        return self.slots[index]

    @cached_property
    def _blueprint_names(self) -> tuple[str, ...]:
        return blueprint_names({site.topology for site in self.sites})

    @cached_property
    def action_space(self) -> ActionSpace:
        """Slots, lifecycle rules and blueprints that a controller can choose from."""
        names, allowed = self._blueprint_names, self.rules.blueprints
        fitting = {
            (index, names.index(spec.name))
            for index, slot in enumerate(self.slots)
            for spec in specs_for(slot.site.topology)
            if is_offered(spec, slot.site) and (not allowed or spec.name in allowed)
        }
        chosen = tuple(sorted({blueprint for _, blueprint in fitting if blueprint < NUM_BLUEPRINTS}))
        unfit = frozenset((i, b) for i in range(len(self.slots)) for b in chosen if (i, b) not in fitting)
        return ActionSpace(self.slot_config, self.rules, chosen, names, unfit)

    def blueprint(self, slot: int, index: int) -> BlueprintSpec:
        """Return the blueprint that an action with blueprint index ``index`` plants at ``slot``."""
        return blueprint_named(self._blueprint_names[index], self.sites[slot].topology)

    # --- seeds --------------------------------------------------------------------------------

    def bind_optimiser(self, optimiser: Optimizer) -> None:
        """Let ``optimiser`` train all seeds, each in a separate parameter group."""
        self.bind(OptimizerGroups(optimiser, self.host, separate=True))

    def bind(self, groups: OptimizerGroups) -> None:
        """Let the optimisers of ``groups`` train all present and later seeds."""
        self.groups = groups
        for slot, graft in self._known.items():
            groups.join(slot, self.slots[slot].place.module, graft.parameters())

    @property
    def _bound(self) -> OptimizerGroups:
        if self.groups is None:
            raise RuntimeError("call bind_optimiser(host_optimiser) before the first seed germinates")
        return self.groups

    def germinate(self, slot: int, blueprint: int, style: int, births: Births | None = None) -> int:
        """Build a seed in ``slot`` and add its parameters to the optimiser; the caller updates the slot
        table. ``births`` states how a copied block starts; as ``self.births`` unless given.

        Returns:
            Number of parameters of the seed and its gate.

        Raises:
            BlueprintError: The blueprint does not fit the slot, or all seeds together would exceed
                ``max_params``.
        """
        place, groups, spec = self.slots[slot], self._bound, self.blueprint(slot, blueprint)
        check_compatible(self.slots, place.site, spec)
        source = self._copied(slot) if spec.copies else None
        position = torch.get_rng_state()
        births, zero = births or self.births, list[nn.Parameter]()

        def prepare(seed: nn.Module) -> None:
            if source is not None and births.zero:
                zero.extend(self._start_without_effect(slot, source, seed))

        graft = place.germinate(spec.name, style, like=self.like(slot), block=source, prepare=prepare)
        try:
            self._check_size(graft)
            groups.join(slot, place.place.module, graft.parameters())
            if source is not None and births.moments:
                groups.copy_moments(host_parameters(source), graft.seed.parameters(), zero)
            self._inform(slot, graft)
            if source is not None and births.renew != 1.0:
                with place.draws():
                    renew_blocks(self.host, source, births.renew, new=graft.copied_block)
        except BaseException:  # KeyboardInterrupt (Ctrl-C) must remove the seed, too.
            self._known.pop(slot, None)
            groups.leave(slot, graft.parameters())
            place.remove()
            torch.set_rng_state(position)
            raise
        self._seed_parameters[slot] = place.seed_parameters()
        return sum(p.numel() for p in graft.parameters())

    def like(self, slot: int) -> Tensor:
        """Return a tensor with the device and dtype for a seed in ``slot``."""
        near = self._bound.near(self.slots[slot].place.module)
        return near[0][0] if near else torch.empty(0)

    def _start_without_effect(self, slot: int, source: nn.Module, seed: nn.Module) -> list[nn.Parameter]:
        """Set the output projections of ``seed``, a copy of the block ``source``, to zero; return them."""
        site = self.sites[slot]
        if isinstance(seed, Stack):  # A side module is called with the features alone.
            features = BlockCall((self.slots[slot].sample_features(self.like(slot), as_they_are=True),), {})
            return zero_outputs(seed.block, features, Argument(0), Output("tensor").features)
        if self.sample is None or site.insertion is None:
            raise BlueprintError(
                f"the copy at slot {site.name} cannot start without effect, because no sample input is known"
            )
        called = captured_call(self.host, source, self.sample)
        return zero_outputs(seed, called, site.insertion.features, site.output.features)

    def _copied(self, slot: int) -> nn.Module | None:
        """Return the block that a ``stack`` seed copies: the nearest upstream copy of it, or itself."""
        found = next(iter(self.slots[slot].block), None)
        for index, earlier in enumerate(self.slots[:slot]):
            is_copy = earlier.graft is not None and described(earlier.graft.description)[0] == "stack"
            if is_copy and self.sites[index].block == self.sites[slot].block:
                found = earlier.graft.copied_block  # type: ignore[union-attr]
        return found

    def _check_size(self, graft: Graft) -> None:
        size, used = sum(p.numel() for p in graft.parameters()), self.grown_params()
        if self.max_params is not None and used > self.max_params:
            raise BlueprintError(
                f"the seed has {size:,} parameters, and of max_params={self.max_params:,} only"
                f" {self.max_params - used + size:,} are left; choose a smaller blueprint"
            )

    def remove(self, slot: int) -> None:
        """Remove the seed of ``slot`` from the forward pass and the optimiser; the caller updates the slot
        table."""
        self.slots[slot].remove()
        self._seed_parameters[slot] = []
        self._forget(slot)

    def _inform(self, slot: int, graft: Graft) -> None:
        self._known[slot] = graft
        for follower in self.followers:
            follower.seed_planted(slot, graft)

    def _forget(self, slot: int) -> None:
        graft = self._known.pop(slot)
        self._bound.leave(slot, graft.parameters())
        for follower in self.followers:
            follower.seed_removed(slot, graft)

    def follow_state(self) -> None:
        """Update optimiser and slot table after ``host.load_state_dict`` has built or removed seeds."""
        changed = [i for i, slot in enumerate(self.slots) if slot.graft is not self._known.get(i)]
        for index in self._known.keys() & changed:  # All leave before any joins: groups keep their order.
            self._forget(index)
            self.table.clear(0, index)
        for index in changed:
            graft = self.slots[index].graft
            if graft is not None:
                self._bound.join(index, self.slots[index].place.module, graft.parameters())
                self._inform(index, graft)
                self._adopt(index, graft)

    def _adopt(self, slot: int, graft: Graft) -> None:
        """Add a seed that ``load_state_dict`` has built to the slot table, with the alpha of the state
        dict."""
        if self.table.occupied[0, slot]:
            return
        name, style = described(graft.description)
        params = sum(p.numel() for p in graft.parameters())
        number = int(self.table.seed_id.max()) + 1
        alpha = float(graft.alpha)
        seed = lifecycle.Germination(number, self._blueprint_names.index(name), style, alpha, 0, params)
        self.table.clear(0, slot)
        lifecycle.germinate(self.table, 0, slot, seed, self.rules)

    def is_finite(self, slot: int) -> bool:
        """Return whether every weight and buffer of the seed in ``slot`` is finite."""
        finite = [tensor.isfinite().all() for tensor in self.slots[slot].held.floats()]
        return bool(torch.stack(finite).all())  # Reads from the device only once.

    def host_parameters(self) -> list[nn.Parameter]:
        """Return the host's parameters, without parameters of seeds."""
        return self._host_parameters

    def seed_parameters(self, slot: int) -> list[nn.Parameter]:
        """Return the parameters of the seed and gate in ``slot``."""
        return self._seed_parameters[slot]

    def drop_gradients(self) -> None:
        """Set the gradients of all parameters of host and seeds to None."""
        for parameters in (self._host_parameters, *self._seed_parameters):
            for parameter in parameters:
                parameter.grad = None

    def grown_params(self) -> int:
        """Return the number of parameters of all seeds together."""
        return sum(p.numel() for slot in self.slots for p in slot.seed_parameters())

    def count_parameters(self) -> tuple[int, int]:
        """Return the number of trainable parameters of the host, and that of its seeds."""
        host = sum(p.numel() for p in self._host_parameters if p.requires_grad)
        return host, sum(p.numel() for s in self.slots for p in s.seed_parameters() if p.requires_grad)

    # --- state --------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return weights, buffers, seeds, random streams of the slots, and the slot table."""
        return network_state.state_of(self)

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a saved state of a network with the same host; its present seeds may differ from the saved
        seeds.

        The saved seeds are built and checked before the network changes. ``load_state`` does not restore the
        parameter groups of the optimiser; its caller does.

        Raises:
            HostError: The state belongs to another host or has non-finite weights; the network is unchanged.
        """
        network_state.load_state(self, state)
        self._known = {i: slot.graft for i, slot in enumerate(self.slots) if slot.graft is not None}
        self.sync()

    def layout(self) -> dict[str, Any]:
        """Return class, sites, blueprint names and slot table of the network as plain values, without
        weights."""
        return network_state.layout_of(self)

    def load_layout(self, state: dict[str, Any]) -> None:
        """Build the seeds of a saved layout in the order in which they were planted; their weights are
        arbitrary.

        Raises:
            HostError: The layout belongs to another network, or ``state`` is not a layout.
        """
        table = network_state.plant_layout(self, state)
        self.follow_state()
        self.table.assign(table)
        self.sync()
