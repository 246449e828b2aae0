"""A user's network with its slots, as an action acts on it: what ``tolaria.actuator`` calls a body.

The slot table owns stages and alphas; ``sync`` copies them to where torch reads them.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from esper.growth import surroundings
from esper.growth.membership import Membership
from esper.growth.sites import Site, dry_forward, find_sites
from esper.growth.slot import COPIES, RESERVED, Graft, GrowthSlot, attach, description_of, slots_of
from esper.kasmina import birth
from esper.kasmina.blueprints import BlueprintSpec, Topology, blueprint_named, names_for, specs_for
from esper.leyline.errors import BlueprintError, HostError
from esper.leyline.factored_actions import BLUEPRINT_IDS, NUM_BLUEPRINTS
from esper.leyline.lifecycle_rules import ActionSpace, LifecycleRules
from esper.leyline.slot_config import SlotConfig
from esper.leyline.slot_table import SlotTable


class GrowingBody:
    """Slots of one network, their row of the slot table, and what has to follow when a seed comes or goes."""

    def __init__(
        self,
        net: nn.Module,
        membership: Membership,
        slots: str | Sequence[str],
        sample: Any,
        rules: LifecycleRules,
        max_params: int | None,
    ) -> None:
        self.net = net
        self.membership = membership
        self.rules = rules
        self.max_params = max_params
        token = uuid.uuid4().hex
        _check_averages(net)
        sites = find_sites(net, slots, sample)
        self._layers = _layers(net, sample)
        self.slots = attach(net, sites, sample, token)
        self.table = SlotTable.empty(1, len(sites))
        self._token = token
        self._average = surroundings.GradientAverage()
        self._grafts: dict[int, Graft] = {}
        """What optimiser, averages and processes know of, by slot."""
        self._nested: WeakSet[nn.Module] = WeakSet()

    @property
    def sites(self) -> list[Site]:
        return [slot.site for slot in self.slots]

    @cached_property
    def action_space(self) -> ActionSpace:
        """What a controller may do; the index of a blueprint is that of its name."""
        names = _names({site.topology for site in self.sites})
        fits = {
            (i, names.index(spec.name))
            for i, site in enumerate(self.sites)
            for spec in specs_for(site.topology)
            if birth.takes(spec, site.width, copyable=site.copyable)
        }
        chosen = tuple(sorted({index for _, index in fits if index < NUM_BLUEPRINTS}))
        unfit = frozenset((i, b) for i in range(len(self.slots)) for b in chosen if (i, b) not in fits)
        config = SlotConfig(tuple(site.name for site in self.sites))
        return ActionSpace(config, self.rules, chosen, names, unfit)

    def spec(self, slot: int, blueprint: int) -> BlueprintSpec:
        return blueprint_named(self.action_space.blueprint_names[blueprint], self.sites[slot].topology)

    def submodule(self, slot: int) -> nn.Module:
        return self.net.get_submodule(self.sites[slot].path)

    # --- what an action does ----------------------------------------------------------------------

    def germinate(self, slot: int, blueprint: int, style: int) -> int:
        """Put a seed into the forward and into the optimiser; returns its parameter count."""
        submodule, near, position = self.submodule(slot), self._near(slot), torch.get_rng_state()
        graft = self.slots[slot].germinate(submodule, self.spec(slot, blueprint).name, style, like=near[0][0])
        graft.requires_grad_(True)
        try:
            self._check_size(graft)
            self.membership.join(graft.parameters(), near)
        except BaseException:  # Ctrl-C too leaves nothing half done
            self.slots[slot].remove()
            torch.set_rng_state(position)
            raise
        if self.spec(slot, blueprint).copies:
            self.membership.copy_moments(host_parameters(submodule), graft.seed.parameters())
        self._settle_in(slot, graft)
        return sum(p.numel() for p in graft.parameters())

    def remove(self, slot: int) -> None:
        """Take the seed out of forward, optimiser, averages and processes."""
        self.slots[slot].remove()
        self._forget(slot)

    def _forget(self, slot: int) -> None:
        graft = self._grafts.pop(slot)
        self.membership.leave(graft.parameters())
        self._average.remove(graft.parameters())
        for _, other in self._averaged_slots(slot):
            other.remove()
        self._keep_padded()

    def bind(self, membership: Membership) -> None:
        """Train the seeds by other optimisers from now on, which may hold them already."""
        self.membership = membership
        for slot, graft in self._grafts.items():
            membership.join(graft.parameters(), self._near(slot))

    def follow_network(self) -> None:
        """Bring optimiser and table in line with seeds that ``net.load_state_dict`` brought or took."""
        for index, slot in enumerate(self.slots):
            if slot.graft is self._grafts.get(index):
                continue
            if index in self._grafts:
                self._forget(index)
                self.table.clear(0, index)
            if slot.graft is not None:
                self.membership.join(slot.graft.parameters(), self._near(index))
                self._settle_in(index, slot.graft)

    def is_finite(self, slot: int) -> bool:
        graft = self.graft(slot)
        return all(bool(torch.isfinite(t).all()) for t in (*graft.parameters(), *graft.buffers()))

    def sync(self) -> None:
        """Bring alphas in line with the table."""
        for slot, alpha, held in zip(self.slots, self.table.alpha[0], self.table.occupied[0], strict=True):
            if held:
                assert slot.graft is not None
                slot.graft.alpha.fill_(float(alpha))

    # --- what is there ----------------------------------------------------------------------------

    def graft(self, slot: int) -> Graft:
        graft = self.slots[slot].graft
        assert graft is not None, f"slot {self.sites[slot].name} is empty"
        return graft

    def grown_params(self) -> int:
        return sum(p.numel() for slot in self.slots for p in slot.parameters())

    def _near(self, slot: int) -> list[list[nn.Parameter]]:
        """The host's parameters by distance: the submodule's own, then upstream, then downstream."""
        own = host_parameters(self.submodule(slot))
        path = self.sites[slot].path
        before = [p for p in self._layers if self._layers[p] < self._layers[path]]
        after = [p for p in self._layers if self._layers[p] > self._layers[path]]
        layers = [own, *(_direct(self.net, p) for p in (*reversed(before), *after))]
        layers.append(host_parameters(self.net))  # what the dry forward did not meet, last of all
        return [layer for layer in layers if layer]

    def _check_size(self, graft: Graft) -> None:
        size, used = sum(p.numel() for p in graft.parameters()), self.grown_params()
        if self.max_params is not None and used > self.max_params:
            raise BlueprintError(
                f"the seed has {size:,} parameters, and of max_params={self.max_params:,} only"
                f" {self.max_params - used + size:,} are left; choose a smaller blueprint"
            )

    # --- who has to follow ------------------------------------------------------------------------

    def _settle_in(self, slot: int, graft: Graft) -> None:
        """Tell everybody of a new seed."""
        self._grafts[slot] = graft
        self._keep_padded()
        if surroundings.is_distributed(self.net):
            surroundings.broadcast([*graft.parameters(), *graft.buffers()])
            self._average.add(graft.parameters())
        for submodule, other in self._averaged_slots(slot):
            other.hold(submodule, copy.deepcopy(graft))

    def _keep_padded(self) -> None:
        """A ``TransformerEncoder`` with a seed inside hands no nested tensors on: seeds take padded ones."""
        for module in (m for net in (self.net, *self.averaged()) for m in net.modules()):
            if isinstance(module, nn.TransformerEncoder):
                seeds = any(slot.graft is not None for slot in slots_of(module.layers).values())
                if seeds and module.use_nested_tensor:
                    module.use_nested_tensor = False
                    self._nested.add(module)
                elif not seeds and module in self._nested:
                    module.use_nested_tensor = True
                    self._nested.discard(module)

    def averaged(self) -> Iterator[nn.Module]:
        """Every network that an ``AveragedModel`` keeps as an average of this one."""
        if not any(slot.token == self._token for slot in COPIES):
            return
        for average in surroundings.averages():
            module = surroundings.unwrapped(average.module)
            if any(slot.token == self._token for slot in slots_of(module).values()):
                yield module

    def _averaged_slots(self, slot: int) -> list[tuple[nn.Module, GrowthSlot]]:
        path = self.sites[slot].path
        return [(net.get_submodule(path), slots_of(net)[path]) for net in self.averaged()]

    def copies_left_behind(self, slot: int) -> list[GrowthSlot]:
        """The slots in copies of this network that hold no seed where it has one."""
        name = self.sites[slot].name
        return [c for c in COPIES if c.token == self._token and c.site.name == name and c.graft is None]

    # --- state ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What the slots hold, without weights: those are in the network's state."""
        return {
            "network": _class_name(self.net),
            "sites": [[site.name, site.path, site.topology, site.width] for site in self.sites],
            "blueprints": list(self.action_space.blueprint_names),
            "table": {name: array[0].tolist() for name, array in self.table.arrays().items()},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Build the seeds of ``state`` anew, with any weights, in the order of their births."""
        found = [[site.name, site.path, site.topology, site.width] for site in self.sites]
        if not {"network", "sites", "table", "blueprints"} <= set(state):
            raise HostError("this is no state of a Growth; pass what its state_dict() returned")
        if state["network"] != _class_name(self.net) or state["sites"] != found:
            raise HostError(
                f"the checkpoint is of a {state['network']} with slots {_listed(state['sites'])}; this is a"
                f" {_class_name(self.net)} with slots {_listed(found)}. Build the same network and pass the"
                " same slots= before load_state_dict"
            )
        table = SlotTable.empty(1, len(self.slots))
        for name, array in table.arrays().items():
            array[0] = state["table"][name]
        for index in sorted(range(len(self.slots)), key=lambda i: table.seed_id[0, i]):
            if table.occupied[0, index]:
                self._rebuild(index, state["blueprints"][table.blueprint[0, index]], table.style[0, index])
            elif self.slots[index].graft is not None:
                self.slots[index].remove()
        self.follow_network()
        self.table.assign(table)
        self.sync()

    def _rebuild(self, slot: int, blueprint: str, style: int) -> None:
        """Hold the seed that is described, if the network's own state has not brought it already."""
        wanted, graft = description_of(blueprint, style), self.slots[slot].graft
        if graft is not None and torch.equal(graft.description.cpu(), wanted):
            return
        if graft is not None:
            self.slots[slot].remove()
        self.slots[slot].rebuild(wanted, self._near(slot)[0][0])


def host_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Parameters of ``module`` that are no seed's."""
    return [p for name, p in module.named_parameters() if RESERVED not in name.split(".")]


def _direct(net: nn.Module, path: str) -> list[nn.Parameter]:
    return list(net.get_submodule(path).parameters(recurse=False))


def _layers(net: nn.Module, sample: Any) -> dict[str, int]:
    """Every submodule that runs, in the order in which their calls end."""
    calls, _ = dry_forward(net, sample)
    return {path: index for index, path in enumerate(dict.fromkeys(each.path for each in calls))}


def _names(topologies: set[Topology]) -> tuple[str, ...]:
    """The name of every blueprint index.

    One kind of features has the indices of the registry. Of several kinds, a name without an index of its own
    takes a free one; where none is left it stands behind the last, out of a controller's reach.
    """
    if len(topologies) == 1:
        return names_for(next(iter(topologies)))
    specs = [spec for topology in sorted(topologies) for spec in specs_for(topology)]
    built_in = {spec.index for spec in specs if BLUEPRINT_IDS[spec.index] == spec.name}
    names = list(BLUEPRINT_IDS)
    free = [i for i in range(1, NUM_BLUEPRINTS) if i not in built_in]
    for name in dict.fromkeys(spec.name for spec in specs if BLUEPRINT_IDS[spec.index] != spec.name):
        if free:
            names[free.pop(0)] = name
        else:
            names.append(name)
    return tuple(names)


def _check_averages(net: nn.Module) -> None:
    for average in surroundings.averages():
        module = surroundings.unwrapped(average.module)
        if type(module) is type(net) and not slots_of(module):
            theirs, own = dict(module.named_parameters()), dict(net.named_parameters())
            if theirs.keys() == own.keys() and all(theirs[n].shape == own[n].shape for n in own):
                raise HostError(
                    f"an AveragedModel of a {type(net).__name__} was made before Growth and would average its"
                    " parameters out of step with a seed's; make it after Growth, then it follows"
                )


def _class_name(net: nn.Module) -> str:
    return f"{type(net).__module__}.{type(net).__qualname__}"


def _listed(sites: Sequence[Sequence[Any]]) -> str:
    return ", ".join(f"{name} ({topology}, {width} wide)" for name, _, topology, width in sites)
