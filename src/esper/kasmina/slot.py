"""Slots: child modules that hold one seed each and blend it into their parent's output in a forward hook.

A seed is a child module, so ``parameters``, ``state_dict``, ``to``, ``train``, deepcopy and pickling include
it. An empty slot has no tensors and no hook: it costs no time, adds no key to the state dict, and does not
disable torch's fused layers. Stage, age and alpha are stored in the slot table.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.kasmina import seed_checks
from esper.kasmina.blueprints import BlueprintSpec, blueprint_named
from esper.kasmina.graft import Graft, Participation, described
from esper.kasmina.optimizer_groups import SEED_NAME
from esper.kasmina.random_streams import TorchStream
from esper.kasmina.sites import Site
from esper.leyline import GrowthWarning, HostError, SlotError, Style

RESERVED: Final = SEED_NAME
"""Name of the slot as a child of its submodule."""


class SeedSlot(nn.Module):
    """Place for one seed after the submodule that has this slot as a child.

    Args:
        site: Position of the slot in the network.
        net: Network that the site is a part of.
        stream: Random stream for initial weights, dropout and sampled alphas of the seeds; None draws from
            torch's global generator.
        token: Identifier shared by all deep copies of one growing network.
    """

    def __init__(
        self, site: Site, net: nn.Module, stream: TorchStream | None = None, token: str = ""
    ) -> None:
        super().__init__()
        self.site = site
        # Modules are stored in tuples, so that torch does not register them as children.
        self.parent = (net.get_submodule(site.path),)
        self.block = () if site.block is None else (net.get_submodule(site.block),)
        """Module that a ``stack`` seed copies, if there is one."""
        self.stream = stream
        self.token = token
        self.forwards = () if stream else tuple({type(module).forward for module in net.modules()})
        """Forward functions of the network that torch.compile may have compiled."""
        self.graft: Graft | None = None
        self.handle: RemovableHandle | None = None
        """Handle of the forward hook; it is pickled, because it reserves the hook's number in a new
        process.
        """

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's has no annotations
        COPIES.add(self)

    # --- forward pass -------------------------------------------------------------------------

    def take_part(self, participation: Participation) -> None:
        """Set the part of the slot's seed, if there is one, in later forward passes."""
        if self.graft is not None:
            self.graft.take_part(participation)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise HostError: only the forward hook runs a seed, and the parent must not call its children one
        by one.
        """
        raise HostError(
            f"the submodule at '{self.site.path}' runs all its children in turn, its slot among them; name"
            " the child that comes last as the slot"
        )

    # --- the seed -----------------------------------------------------------------------------

    def germinate(
        self, blueprint: str, style: int = Style.LINEAR_ADD, *, like: Tensor, block: nn.Module | None = None
    ) -> Graft:
        """Build a seed, check it and attach it to the forward pass at full alpha.

        A blueprint that is refused leaves slot and random state unchanged.

        Args:
            blueprint: Name of the blueprint.
            style: Index of the blend style.
            like: Tensor with the device and dtype of the seed's parameters.
            block: Module that a copying blueprint repeats; the site's block unless given.

        Raises:
            SlotError: The slot holds a seed.
            BlueprintError: The blueprint does not fit the slot, or the delta of its seed is not exactly zero.
        """
        if self.graft is not None:
            raise SlotError(f"slot {self.site.name} holds a seed already; prune it before the next one")
        spec = blueprint_named(blueprint, self.site.topology)
        seed_checks.check_fits(spec, self.site.name, self.site.width, copyable=self.site.block is not None)
        sample = self.sample_features(like, as_they_are=spec.copies)
        with self._restored_on_error(), self.draws(), seed_checks.refusals(spec, sample):
            graft = self._built(spec, style, like, block)
            stochastic = seed_checks.check_birth(spec, graft.seed, sample)
        graft.stream, graft.stochastic = self.stream, stochastic
        self.hold(graft)
        return graft

    def draws(self) -> AbstractContextManager[object]:
        """Enter the slot's random stream, if it has one."""
        return nullcontext() if self.stream is None else self.stream

    @contextmanager
    def _restored_on_error(self) -> Iterator[None]:
        """Restore the random state after an error, Ctrl-C included."""
        position = torch.get_rng_state() if self.stream is None else self.stream.get_state()
        try:
            yield
        except BaseException:
            (torch.set_rng_state if self.stream is None else self.stream.set_state)(position)
            raise

    def hold(self, graft: Graft) -> None:
        """Attach ``graft`` to the forward pass of the slot's submodule."""
        [submodule] = self.parent
        self.graft = graft.train(submodule.training)
        self.handle = submodule.register_forward_hook(graft.on_forward)
        self._notice_hooks()

    def remove(self) -> Graft:
        """Empty the slot and return its graft; the random stream continues."""
        assert self.handle is not None
        graft = self.held
        self.handle.remove()
        self.graft, self.handle = None, None
        self._notice_hooks()
        return graft

    def _notice_hooks(self) -> None:
        # Networks of environments, whose slots have random streams, are never compiled.
        if self.stream is None:
            notice_hooks(self.forwards)

    @property
    def seed(self) -> nn.Module | None:
        """Seed module of the slot; None if the slot is empty."""
        return None if self.graft is None else self.graft.seed

    @property
    def held(self) -> Graft:
        """Graft of a slot that is known to hold a seed."""
        assert self.graft is not None, f"slot {self.site.name} is empty"
        return self.graft

    # --- state --------------------------------------------------------------------------------

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Build the seed that a state dict describes, or remove the present seed, before weights are
        loaded.
        """
        wanted = state_dict.get(f"{prefix}graft.description")
        if self.graft is not None and wanted is None:
            GrowthWarning.issue(
                f"the state that was loaded has no seed in slot {self.site.name}; its own was removed"
            )
        self.match(wanted, next(self.parent[0].parameters(), state_dict.get(f"{prefix}graft.alpha")))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def match(self, description: Tensor | None, like: Tensor | None) -> None:
        """Attach a seed of the given description, or empty the slot; keep the present seed if it matches.

        A new seed has arbitrary weights, with the device and dtype of ``like``.
        """
        kept = None if self.graft is None else self.graft.description.cpu()
        if kept is not None and (description is None or not torch.equal(kept, description.cpu())):
            self.remove()
        if self.graft is None and description is not None and like is not None:
            self.hold(self.rebuilt(description, like))

    def rebuilt(self, description: Tensor, like: Tensor) -> Graft:
        """Return a graft of the given description with arbitrary weights, not attached; the random state is
        unchanged.
        """
        blueprint, style = described(description)
        spec = blueprint_named(blueprint, self.site.topology)
        with TorchStream(0):
            return self._built(spec, style, like)

    def _built(self, spec: BlueprintSpec, style: int, like: Tensor, block: nn.Module | None = None) -> Graft:
        source = block if block is not None else next(iter(self.block), None)
        copied = without_slots(source) if spec.copies and source is not None else None
        graft = Graft(self.site, spec, style, copied).to(like).requires_grad_(True)
        if self.site.channels_last:
            graft.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in stubs
        return graft

    def sample_features(self, like: Tensor, *, as_they_are: bool) -> Tensor:
        """Return synthetic features of two samples; all values differ, because normalisation maps a constant
        to 0.
        """
        shape = (2, *self.site.shape[1:])
        sample = torch.linspace(-1.0, 1.0, math.prod(shape)).view(shape).to(like)
        return sample.transpose(*self.site.swap) if self.site.swap and as_they_are else sample


COPIES: Final[WeakSet[SeedSlot]] = WeakSet()
"""Slots that were created by deepcopy or unpickling."""


def without_slots(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` without slots."""
    twin = copy.deepcopy(module)
    detach(twin)
    return twin


def slots_of(net: nn.Module) -> dict[str, SeedSlot]:
    """Return the slots in ``net`` by the path of their submodule."""
    found = ((path, module._modules.get(RESERVED)) for path, module in net.named_modules())
    return {path: slot for path, slot in found if isinstance(slot, SeedSlot)}


def attach(net: nn.Module, slots: Sequence[SeedSlot]) -> None:
    """Make every slot a child of its submodule."""
    if slots_of(net):
        raise HostError(
            f"this {type(net).__name__} is growing already; call finish() of its Growth before another"
        )
    for slot in slots:
        slot.parent[0].add_module(RESERVED, slot)


def detach(net: nn.Module) -> None:
    """Remove all slots and their seeds from ``net``."""
    for path, slot in slots_of(net).items():
        if slot.graft is not None:
            slot.remove()
        del net.get_submodule(path)._modules[RESERVED]


def notice_hooks(forwards: Iterable[Callable[..., Any]] = ()) -> None:
    """Let torch.compile notice hooks that were added or removed; by default torch.compile ignores changes of
    hooks.

    Code that was compiled before the first call is reset, once per process. In later calls, a changed hook
    recompiles only code that runs the hook's module; the compiled code of ``forwards`` is dropped, so that
    growth does not reach the recompile limit.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return
    if dynamo.config.skip_nnmodule_hook_guards:
        dynamo.config.skip_nnmodule_hook_guards = False
        dynamo.reset()
    for forward in forwards:
        dynamo.eval_frame.remove_from_cache(forward)
