"""Slots: child modules that can hold one seed each; a forward hook blends the seed into the output of the
slot's parent.

A seed is a child module, so that ``parameters``, ``state_dict``, ``to``, ``train``, deepcopy and pickling
include the seed. An empty slot has no tensors and no hook: it costs no time, adds no key to the state dict,
and does not disable torch's fused layers. Stage, age and alpha of a slot's seed are stored in the slot table.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.kasmina.birth import MASK_WARNING, check_birth, check_fits, refusals
from esper.kasmina.blueprints import BlueprintSpec, blueprint_named
from esper.kasmina.blueprints.tokens import MIXING
from esper.kasmina.edits import BlockContainer
from esper.kasmina.graft import BlockGraft, Graft, Handles, Participation, SideGraft
from esper.kasmina.low_rank import extend, new_extensions
from esper.kasmina.optimizer_groups import SEED_NAME
from esper.kasmina.random_streams import TorchStream
from esper.kasmina.seed_description import described, described_causality, described_rank
from esper.kasmina.sites import Site
from esper.kasmina.state_checks import check_blocks, listed, seeds_in, text_of
from esper.kasmina.widening import PairLayers, WidthGraft
from esper.leyline import GrowthWarning, HostError, SlotError, Style
from esper.leyline.errors import IncompatibleSeedError

RESERVED: Final = SEED_NAME
"""Name under which a slot is a child of its submodule."""


class Place(NamedTuple):
    """Submodule of a network that has a slot, the container of its blocks, and layers that can be widened."""

    module: nn.Module
    container: BlockContainer | None
    """Container into which copied blocks are inserted; None if copied blocks become side modules."""
    layers: PairLayers | None
    """Layers between which hidden units are added; None if there are none."""

    @property
    def block(self) -> nn.Module:
        """Block behind which a copy is inserted; the place must have a container."""
        assert self.container is not None
        return self.container.blocks[self.container.position(self.module)]

    @classmethod
    def of(cls, net: nn.Module, site: Site) -> Place:
        """Return the place of ``site`` in a network without inserted blocks."""
        insertion, pair = site.insertion, site.pair
        return cls(
            net.get_submodule(site.path),
            None if insertion is None else BlockContainer(net, insertion),
            None if pair is None else PairLayers.of(net, pair),
        )


class SeedSlot(nn.Module):
    """Slot, which can hold one seed; the seed changes the output of the slot's parent.

    Args:
        site: Position of the slot in the network.
        net: Network that contains the site.
        stream: Random stream for initial weights, dropout and sampled alphas of the slot's seeds; None for
            torch's global generator.
        token: Identifier shared by all deep copies of one growing network.
    """

    def __init__(
        self, site: Site, net: nn.Module, stream: TorchStream | None = None, token: str = ""
    ) -> None:
        super().__init__()
        self.site = site
        # Tuples keep torch from registering ``place`` and ``block`` as child modules.
        self.place = Place.of(net, site)
        self.block = () if site.block is None else (net.get_submodule(site.block),)
        """Tuple with the module that a ``stack`` seed copies; empty if there is none."""
        self.stream = stream
        self.token = token
        self.forwards = () if stream else tuple({type(module).forward for module in net.modules()})
        """Forward functions of all modules of the network, which torch.compile may have compiled."""
        self.graft: Graft | None = None
        self.handle: RemovableHandle | Handles | None = None
        """Handle of the hooks of the slot's seed; it is pickled with the slot, because unpickling it reserves
        the number of the hook in a new process.
        """

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's has no annotations
        COPIES.add(self)

    # --- forward pass -------------------------------------------------------------------------

    def take_part(self, participation: Participation) -> None:
        """Set the participation of the slot's seed, if there is one, in later forward passes."""
        if self.graft is not None:
            self.graft.take_part(participation)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise HostError, because the slot was called as a module: its seed is run by a forward hook, and
        the slot's parent must not call its children in sequence.
        """
        raise HostError(
            f"the submodule at '{self.site.path}' runs all its children in turn, its slot among them; name"
            " the child that comes last as the slot"
        )

    # --- the seed -----------------------------------------------------------------------------

    def germinate(
        self,
        blueprint: str,
        style: int = Style.LINEAR_ADD,
        *,
        like: Tensor,
        block: nn.Module | None = None,
        prepare: Callable[[nn.Module], object] = lambda _: None,
    ) -> Graft:
        """Build a seed, check its delta, and attach it to the forward pass at alpha 1.

        If the blueprint is refused, slot and random state are unchanged.

        Args:
            blueprint: Name of the seed's blueprint.
            style: Index of the blend style.
            like: Tensor whose device and dtype the seed's parameters get.
            block: Module that a copying blueprint copies; the block of the site unless given.
            prepare: Function that is called with the seed before it is attached.

        Raises:
            SlotError: The slot already holds a seed.
            BlueprintError: The blueprint does not fit the slot, or the delta of its seed is not allowed.
        """
        if self.graft is not None:
            raise SlotError(f"slot {self.site.name} holds a seed already; prune it before the next one")
        spec = blueprint_named(blueprint, self.site.topology)
        check_fits(spec, self.site)
        if spec.name in MIXING and self.site.hides_mask:
            GrowthWarning.issue(MASK_WARNING.format(spec.name, self.site.name))
        sample = self.sample_features(like, as_they_are=spec.copies)
        with self._restored_on_error(), self.draws():
            with refusals(spec, sample):
                graft = self._built(spec, style, like, block)
                if isinstance(graft, SideGraft):
                    graft.stochastic = check_birth(spec, graft.seed, sample)
            prepare(graft.seed)
        graft.stream = self.stream
        self.hold(graft)
        return graft

    def draws(self) -> AbstractContextManager[object]:
        """Return a context in which torch draws from the slot's random stream, if the slot has one."""
        return nullcontext() if self.stream is None else self.stream

    @contextmanager
    def _restored_on_error(self) -> Iterator[None]:
        """Restore the random state if the code inside the context raises an exception, Ctrl-C included."""
        position = torch.get_rng_state() if self.stream is None else self.stream.get_state()
        try:
            yield
        except BaseException:
            (torch.set_rng_state if self.stream is None else self.stream.set_state)(position)
            raise

    def hold(self, graft: Graft) -> None:
        """Put ``graft`` into the slot and attach it to the forward pass behind the submodule of the slot."""
        self.graft = graft
        self.handle = graft.attach(*self.place)
        self._notice_hooks()

    def remove(self) -> Graft:
        """Empty the slot and return its graft; the random stream of the slot is not reset."""
        graft = self.held
        graft.detach(self.place.container)
        if self.handle is not None:
            self.handle.remove()
        self.graft, self.handle = None, None
        self._notice_hooks()
        return graft

    def _notice_hooks(self) -> None:
        # A slot with a random stream belongs to an environment, whose network is never compiled.
        if self.stream is None:
            notice_hooks(self.forwards)

    @property
    def seed(self) -> nn.Module | None:
        """Seed module of the slot; None if the slot is empty."""
        return None if self.graft is None else self.graft.seed

    def seed_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the slot's seed and its gate."""
        return [] if self.graft is None else list(self.graft.parameters())

    @property
    def label(self) -> str:
        """Text about the slot's seed; empty without a seed, and for a seed that is a block of the network."""
        graft = self.graft
        return "" if graft is None or isinstance(graft, BlockGraft) else text_of(graft.description)

    @property
    def held(self) -> Graft:
        """Graft of the slot; the slot must hold a seed."""
        assert self.graft is not None, f"slot {self.site.name} is empty"
        return self.graft

    # --- state --------------------------------------------------------------------------------

    def match(self, description: Tensor | None, like: Tensor | None) -> None:
        """Put a seed of the given description into the slot; keep the present seed if it has this
        description; empty the slot if the description is None.

        A new seed has arbitrary weights, and the device and dtype of ``like``, or of the copied block.
        """
        kept = None if self.graft is None else self.graft.description.cpu()
        if kept is not None and (description is None or not torch.equal(kept, description.cpu())):
            self.remove()
        is_possible = like is not None or self.place.container is not None
        if self.graft is None and description is not None and is_possible:
            self.hold(self.rebuilt(description, like))

    def rebuilt(self, description: Tensor, like: Tensor | None) -> Graft:
        """Return a new graft of the given description with arbitrary weights, not attached; the random state
        is unchanged. A side module gets device and dtype of ``like``.

        Raises:
            BlueprintError: The blueprint does not fit the slot.
        """
        blueprint, style = described(description)
        spec, rank = blueprint_named(blueprint, self.site.topology), described_rank(description)
        check_fits(spec, self.site)
        with TorchStream(0):
            graft = self._built(spec, style, like, is_causal=described_causality(description))
            if rank is not None:
                extend(graft, new_extensions(graft.seed, rank))
        return graft

    def _built(
        self,
        spec: BlueprintSpec,
        style: int,
        like: Tensor | None,
        block: nn.Module | None = None,
        is_causal: bool | None = None,
    ) -> Graft:
        source = block if block is not None else next(iter(self.block), None)
        copied = without_slots(source) if spec.copies and source is not None else None
        if copied is not None and self.place.container is not None:
            copied.requires_grad_(True)
            return BlockGraft(self.site, spec, style, copied).to(next(copied.parameters()).device)
        if spec.widens and self.place.layers is not None:
            return WidthGraft(self.site, spec, style, self.place.layers).requires_grad_(True)
        assert like is not None
        graft = SideGraft(self.site, spec, style, copied, is_causal).to(like).requires_grad_(True)
        if self.site.channels_last:
            graft.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in stubs
        return graft

    def sample_features(self, like: Tensor, *, as_they_are: bool) -> Tensor:
        """Return synthetic features of two samples; all values differ, because a constant would be normalised
        to 0.
        """
        shape = (2, *self.site.shape[1:])
        sample = torch.linspace(-1.0, 1.0, math.prod(shape)).view(shape).to(like)
        return sample.transpose(*self.site.swap) if self.site.swap and as_they_are else sample


COPIES: Final[WeakSet[SeedSlot]] = WeakSet()
"""All slots that were created by deepcopy or unpickling."""


def without_slots(module: nn.Module) -> nn.Module:
    """Return a deep copy of ``module`` without slots and without hooks of seeds."""
    slots = slots_of(module)
    twin = copy.deepcopy(module, {id(slot): None for slot in slots.values()})
    for path in slots:
        del twin.get_submodule(path)._modules[RESERVED]
    for inner in twin.modules():
        for hooks in (inner._forward_hooks, inner._forward_pre_hooks):
            for number, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), Graft):
                    del hooks[number]
                    inner._forward_hooks_with_kwargs.pop(number, None)
    return twin


def slots_of(net: nn.Module) -> dict[str, SeedSlot]:
    """Return all slots in ``net``, by the path of their submodule."""
    found = ((path, module._modules.get(RESERVED)) for path, module in net.named_modules())
    return {path: slot for path, slot in found if isinstance(slot, SeedSlot)}


def check_compatible(slots: Iterable[SeedSlot], site: Site, spec: BlueprintSpec) -> None:
    """Raise IncompatibleSeedError if a seed of ``spec`` at ``site`` and the seed of another slot cannot both
    be part of the network: one would receive the hidden units that the other adds."""
    for slot in slots:
        if slot.graft is None or slot.site.name == site.name:
            continue
        theirs = slot.site.pair if isinstance(slot.graft, WidthGraft) else None
        own = site.pair if spec.widens else None
        is_same = own is not None and theirs is not None and bool({*own.first} & {*theirs.first})
        is_inside = theirs is not None and own is None and site.path in theirs.widened
        contains = own is not None and theirs is None and slot.site.path in own.widened
        if is_same or is_inside or contains:
            raise IncompatibleSeedError(
                f"blueprint '{spec.name}' at slot {site.name} and the seed of slot {slot.site.name} change"
                " the same hidden units; prune that seed, or choose another slot"
            )


def place_in(net: nn.Module, site: Site) -> Place:
    """Return the place of ``site`` in ``net``, with or without slots."""
    slots = (slot for slot in slots_of(net).values() if slot.site.name == site.name)
    found = next(slots, None)
    return Place.of(net, site) if found is None else found.place


def attach(net: nn.Module, slots: Sequence[SeedSlot]) -> None:
    """Add every slot as a child of its submodule; raise HostError if ``net`` already has slots."""
    if slots_of(net):
        raise HostError(
            f"this {type(net).__name__} is growing already; call finish() of its Growth before another"
        )
    for slot in slots:
        slot.place.module.add_module(RESERVED, slot)
    net.register_load_state_dict_pre_hook(_check_state)


def detach(net: nn.Module) -> None:
    """Remove all slots and their seeds from ``net``."""
    for slot in slots_of(net).values():
        if slot.graft is not None:
            slot.remove()
        del slot.place.module._modules[RESERVED]
    stop_checking(net)


def stop_checking(net: nn.Module) -> None:
    """Remove the hooks of state dicts that Esper has registered."""
    for hooks in (net._load_state_dict_pre_hooks, net._state_dict_hooks):
        for number, hook in list(hooks.items()):
            if str(getattr(hook, "hook", hook).__module__).startswith("esper."):
                del hooks[number]


def _check_state(net: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Raise HostError before a state dict is loaded that has other seeds or blocks than the growing
    network."""
    slots = slots_of(net)
    remedy = "call growth.load_state_dict(...) first, with the result of growth.state_dict() at that time"
    check_blocks(slots_with_blocks(net), state_dict, prefix, remedy)
    own = {path: text for path, slot in slots.items() if (text := slot.label)}
    found = seeds_in(state_dict, prefix)
    if found != own and (found or is_complete(net, state_dict, prefix)):
        raise HostError(f"the state has {listed(found)}, and this network has {listed(own)}; {remedy}")


def slots_with_blocks(net: nn.Module) -> dict[str, nn.Module]:
    """Return the containers of ``net`` into which blocks can be inserted, by path."""
    containers = [slot.place.container for slot in slots_of(net).values()]
    blocks = {each.blocks for each in containers if each is not None}
    return {path: module for path, module in net.named_modules() if module in blocks}


def is_complete(net: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> bool:
    """Return whether a state dict has all tensors of the network itself, without seeds and containers of
    blocks."""
    inside = tuple(path and f"{path}." for path in slots_with_blocks(net))
    names = [name for name in net.state_dict() if RESERVED not in name.split(".")]
    own = [name for name in names if not name.startswith(inside)]
    return any(name.startswith(prefix) for name in state_dict) and all(prefix + n in state_dict for n in own)


def notice_hooks(forwards: Iterable[Callable[..., Any]] = ()) -> None:
    """Let torch.compile notice hooks that were added or removed; by default torch.compile ignores changes of
    hooks.

    The first call of ``notice_hooks`` in a process discards all code that torch.compile has compiled. After
    the first call, a changed hook recompiles only the code that runs the hook's module. Every call discards
    the compiled code of the functions ``forwards``, so that growth does not reach the recompile limit.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return
    if dynamo.config.skip_nnmodule_hook_guards:
        dynamo.config.skip_nnmodule_hook_guards = False
        dynamo.reset()
    for forward in forwards:
        dynamo.eval_frame.remove_from_cache(forward)
