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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.kasmina.blueprints import BlueprintSpec, blueprint_named, specs_for
from esper.kasmina.graft import Graft, Participation, described
from esper.kasmina.optimizer_groups import SEED_NAME
from esper.kasmina.random_streams import TorchStream
from esper.kasmina.sites import Site
from esper.leyline import BlueprintError, GrowthWarning, HostError, SlotError, Style

RESERVED: Final = SEED_NAME
"""Name under which a slot is a child of its submodule."""


class SeedSlot(nn.Module):
    """Slot, which can hold one seed; the seed changes the output of the submodule that has the slot as a
    child.

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
        # Tuples keep torch from registering ``parent`` and ``block`` as child modules.
        self.parent = (net.get_submodule(site.path),)
        self.block = () if site.block is None else (net.get_submodule(site.block),)
        """Tuple with the module that a ``stack`` seed copies; empty if there is none."""
        self.stream = stream
        self.token = token
        self.forwards = () if stream else tuple({type(module).forward for module in net.modules()})
        """Forward functions of all modules of the network, which torch.compile may have compiled."""
        self.graft: Graft | None = None
        self.handle: RemovableHandle | None = None
        """Handle of the forward hook; it is pickled with the slot, because unpickling it reserves the number
        of the hook in a new process.
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
        self, blueprint: str, style: int = Style.LINEAR_ADD, *, like: Tensor, block: nn.Module | None = None
    ) -> Graft:
        """Build a seed, check its delta, and attach it to the forward pass at alpha 1.

        If the blueprint is refused, slot and random state are unchanged.

        Args:
            blueprint: Name of the seed's blueprint.
            style: Index of the blend style.
            like: Tensor whose device and dtype the seed's parameters get.
            block: Module that a copying blueprint copies; the block of the site unless given.

        Raises:
            SlotError: The slot already holds a seed.
            BlueprintError: The blueprint does not fit the slot, or the delta of its seed is not allowed.
        """
        if self.graft is not None:
            raise SlotError(f"slot {self.site.name} holds a seed already; prune it before the next one")
        spec = blueprint_named(blueprint, self.site.topology)
        check_fits(spec, self.site.name, self.site.width, copyable=self.site.block is not None)
        sample = self.sample_features(like, as_they_are=spec.copies)
        with self._restored_on_error(), self.draws(), refusals(spec, sample):
            graft = self._built(spec, style, like, block)
            stochastic = check_birth(spec, graft.seed, sample)
        graft.stream, graft.stochastic = self.stream, stochastic
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
        """Put ``graft`` into the slot and register its forward hook at the submodule that has the slot."""
        [submodule] = self.parent
        self.graft = graft.train(submodule.training)
        self.handle = submodule.register_forward_hook(graft.on_forward)
        self._notice_hooks()

    def remove(self) -> Graft:
        """Empty the slot and return its graft; the random stream of the slot is not reset."""
        assert self.handle is not None
        graft = self.held
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

    @property
    def held(self) -> Graft:
        """Graft of the slot; the slot must hold a seed."""
        assert self.graft is not None, f"slot {self.site.name} is empty"
        return self.graft

    # --- state --------------------------------------------------------------------------------

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Build the seed that the state dict describes, before its weights are loaded; remove the present
        seed if the state dict has none.
        """
        wanted = state_dict.get(f"{prefix}graft.description")
        if self.graft is not None and wanted is None:
            GrowthWarning.issue(
                f"the state that was loaded has no seed in slot {self.site.name}; its own was removed"
            )
        self.match(wanted, next(self.parent[0].parameters(), state_dict.get(f"{prefix}graft.alpha")))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def match(self, description: Tensor | None, like: Tensor | None) -> None:
        """Put a seed of the given description into the slot; keep the present seed if it has this
        description; empty the slot if the description is None.

        A new seed has arbitrary weights, and the device and dtype of ``like``.
        """
        kept = None if self.graft is None else self.graft.description.cpu()
        if kept is not None and (description is None or not torch.equal(kept, description.cpu())):
            self.remove()
        if self.graft is None and description is not None and like is not None:
            self.hold(self.rebuilt(description, like))

    def rebuilt(self, description: Tensor, like: Tensor) -> Graft:
        """Return a new graft of the given description with arbitrary weights, not attached; the random state
        is unchanged.
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
        """Return synthetic features of two samples; all values differ, because a constant would be normalised
        to 0.
        """
        shape = (2, *self.site.shape[1:])
        sample = torch.linspace(-1.0, 1.0, math.prod(shape)).view(shape).to(like)
        return sample.transpose(*self.site.swap) if self.site.swap and as_they_are else sample


COPIES: Final[WeakSet[SeedSlot]] = WeakSet()
"""All slots that were created by deepcopy or unpickling."""


def without_slots(module: nn.Module) -> nn.Module:
    """Return a deep copy of ``module`` without slots."""
    twin = copy.deepcopy(module)
    detach(twin)
    return twin


def slots_of(net: nn.Module) -> dict[str, SeedSlot]:
    """Return all slots in ``net``, by the path of their submodule."""
    found = ((path, module._modules.get(RESERVED)) for path, module in net.named_modules())
    return {path: slot for path, slot in found if isinstance(slot, SeedSlot)}


def attach(net: nn.Module, slots: Sequence[SeedSlot]) -> None:
    """Add every slot as a child of its submodule; raise HostError if ``net`` already has slots."""
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


def check_fits(spec: BlueprintSpec, slot: str, width: int, *, copyable: bool) -> None:
    """Raise BlueprintError if ``slot`` cannot hold a seed of ``spec``; the error message lists blueprints
    that fit.
    """
    others = ", ".join(s.name for s in specs_for(spec.topology) if s.fits(width, copyable=copyable))
    if spec.copies and not copyable:
        raise BlueprintError(
            f"blueprint '{spec.name}' copies the last block upstream, and slot {slot} has none: a module with"
            " parts, called with one tensor, whose shape it keeps (a Sequential stands for its last child);"
            f" choose from {others}"
        )
    if not spec.fits(width, copyable=copyable):
        raise BlueprintError(
            f"blueprint '{spec.name}' needs a slot whose width is a multiple of {spec.multiple_of};"
            f" slot {slot} is {width} wide. Change the host's width, or choose from"
            f" {others}"
        )


@contextmanager
def refusals(spec: BlueprintSpec, sample: Tensor) -> Iterator[None]:
    """Convert any error inside the context into a BlueprintError, for code that builds a seed and runs it on
    ``sample``."""
    try:
        yield
    except BlueprintError:
        raise
    except Exception as error:
        raise BlueprintError(
            f"blueprint '{spec.name}' fails on features of shape {tuple(sample.shape[1:])}: {error}"
        ) from error


def check_birth(spec: BlueprintSpec, seed: nn.Module, sample: Tensor) -> bool:
    """Run a copy of the seed on ``sample`` in training and evaluation mode, and check that its delta is
    allowed.

    Returns:
        Whether the seed draws random numbers in training mode, for example for dropout.

    Raises:
        BlueprintError: The seed has no parameters, or its delta is not finite, is not zero, or has another
            shape than ``sample``.
    """
    if not any(True for _ in seed.parameters()):
        raise BlueprintError(
            f"blueprint '{spec.name}' has no parameters, so its seed could not learn; give it a layer with"
            " weights"
        )
    # A copy of the seed is run, so that running statistics of the seed itself do not change.
    trial, sample = copy.deepcopy(seed).cpu(), sample.cpu()
    before = torch.get_rng_state()
    _check_delta(spec, trial.train(), sample)
    stochastic = not torch.equal(before, torch.get_rng_state())
    _check_delta(spec, trial.eval(), sample)
    return stochastic


def _check_delta(spec: BlueprintSpec, seed: nn.Module, sample: Tensor) -> None:
    """Raise BlueprintError unless the delta of a new seed has the shape of its input, is finite, and is
    exactly zero.

    The delta of a seed that copies a block may be non-zero. A seed must not change its input in place.
    """
    name, features = spec.name, sample.clone()
    with torch.no_grad():
        delta = seed(features)
    if not isinstance(delta, Tensor) or delta.shape != sample.shape:
        found = tuple(delta.shape) if isinstance(delta, Tensor) else type(delta).__name__
        raise BlueprintError(
            f"blueprint '{name}' must keep the shape of its input {tuple(sample.shape)}; it returned {found}"
        )
    if not torch.equal(features, sample):
        raise BlueprintError(
            f"blueprint '{name}' changes its input in place, and with it the host's features; leave out"
            " inplace=True and methods that end in an underscore"
        )
    if not torch.isfinite(delta).all():
        raise BlueprintError(
            f"blueprint '{name}' returned a non-finite delta at birth; look for a division by zero or an"
            " overflow in its forward"
        )
    if not spec.copies and torch.count_nonzero(delta):
        raise BlueprintError(
            f"blueprint '{name}' must return a delta of exactly zero at birth; its largest value"
            f" is {delta.abs().max().item():.3g}. Make it an esper.kasmina.Mirrored or start its last"
            " linear layer at zero"
        )
