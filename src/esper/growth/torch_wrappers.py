"""Wrappers and copies of a user's network, which must also receive its seeds: DDP, weight averages, compiled
code."""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any, Final
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from esper.kasmina.graft import Graft
from esper.kasmina.low_rank import extend, extensions_beyond, rank_of
from esper.kasmina.network import MorphogeneticModel
from esper.kasmina.slot import RESERVED, SeedSlot, attach, slots_of
from esper.leyline.errors import HostError

_SHARDED: Final = ("FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")


def unwrapped(net: Any) -> nn.Module:
    """Return the user's own module inside ``torch.compile`` and ``DistributedDataParallel``.

    Raises:
        HostError: The argument is not a module, or is a wrapper that cannot accept new parameters.
    """
    if not isinstance(net, nn.Module):
        raise HostError(f"net is {type(net).__name__}; pass the torch.nn.Module that is trained")
    while True:
        kinds = {kind.__name__ for kind in type(net).__mro__}
        if kinds & set(_SHARDED) or isinstance(net, DataParallel):
            raise HostError(
                f"{type(net).__name__} keeps parameters where a seed cannot join them; use one device or"
                " DistributedDataParallel"
            )
        if isinstance(net, AveragedModel):
            raise HostError("AveragedModel is an average of a network; pass the network that is trained")
        if isinstance(net, torch.jit.ScriptModule):
            raise HostError(
                f"{type(net).__name__} is scripted and takes no hooks; pass the module before scripting"
            )
        if isinstance(net, DistributedDataParallel):
            net = net.module
        elif isinstance(getattr(net, "_orig_mod", None), nn.Module):
            net = net._orig_mod
        else:
            return net


def recompile_limits_hit() -> int:
    """Return how many functions torch.compile has stopped compiling because they changed too often."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return 0
    return sum(n for what, n in dynamo.utils.counters["unimplemented"].items() if "recompile limit" in what)


# --- copies that follow the network -------------------------------------------------------------------------


class FollowedCopies:
    """Copies of the network, such as weight averages, that receive and lose every seed together with the
    network."""

    def __init__(self, network: MorphogeneticModel) -> None:
        self._network = network
        self.modules: list[nn.Module] = []
        self._padded: WeakSet[nn.Module] = WeakSet()
        _guard_averages()

    def add(self, follower: Any) -> None:
        """Plant all seeds of the network in ``follower``, an ``AveragedModel`` or a deep copy of the network.

        Raises:
            HostError: ``follower`` is not a copy of this network.
        """
        module = unwrapped(follower.module if isinstance(follower, AveragedModel) else follower)
        net, slots = self._network.host, slots_of(module)
        token = self._network.slots[0].token
        if not slots and _same_parameters(module, net):
            attach(module, [SeedSlot(site, module, token=token) for site in self._network.sites])
            slots = slots_of(module)
        if module is net or not slots or any(slot.token != token for slot in slots.values()):
            raise HostError(
                f"follow holds a {type(follower).__name__} that is no copy of this {type(net).__name__}; pass"
                " its AveragedModel or a deep copy of it"
            )
        self.modules.append(module)
        for index, graft in enumerate(slot.graft for slot in self._network.slots):
            other = self._slot_in(module, index)
            if graft is not None and other.graft is None:
                other.hold(copy.deepcopy(graft))

    def _slot_in(self, module: nn.Module, index: int) -> SeedSlot:
        name = self._network.sites[index].name
        return next(slot for slot in slots_of(module).values() if slot.site.name == name)

    def seed_planted(self, slot: int, graft: Graft) -> None:
        """Plant a copy of the new seed in every copy of the network."""
        for module in self.modules:
            self._slot_in(module, slot).hold(copy.deepcopy(graft))
        self._keep_padded()

    def seed_removed(self, slot: int, _graft: Graft) -> None:
        """Remove the seed of ``slot`` from every copy of the network."""
        for module in self.modules:
            self._slot_in(module, slot).remove()
        self._keep_padded()

    def rank_raised(self, slot: int, graft: Graft) -> None:
        """Raise the rank of the seed in ``slot`` of every copy, with the new weights of the network."""
        for own in self.grafts(slot):
            extend(own, extensions_beyond(graft.seed, rank_of(own.seed)))

    def grafts(self, slot: int) -> list[Graft]:
        """Return the graft in ``slot`` of every copy."""
        return [self._slot_in(module, slot).held for module in self.modules]

    def sync(self) -> None:
        """Make every seed of a copy active or inactive in the forward pass, like the network's seed in the
        same slot."""
        for module in self.modules:
            for index, slot in enumerate(self._network.slots):
                if slot.graft is not None:
                    self._slot_in(module, index).take_part(slot.graft.participation)

    def _keep_padded(self) -> None:
        """Disable nested tensors in a ``TransformerEncoder`` with seeds, because seeds need padded
        tensors."""
        for module in (m for net in (self._network.host, *self.modules) for m in net.modules()):
            if isinstance(module, nn.TransformerEncoder):
                seeds = any(slot.graft is not None for slot in slots_of(module.layers).values())
                if seeds and module.use_nested_tensor:
                    module.use_nested_tensor = False
                    self._padded.add(module)
                elif not seeds and module in self._padded:
                    module.use_nested_tensor = True
                    self._padded.discard(module)


def _same_parameters(module: nn.Module, net: nn.Module) -> bool:
    """Return whether two networks have the same class and equal parameter shapes; seeds of ``net`` are
    ignored."""
    own = {name: p.shape for name, p in net.named_parameters() if RESERVED not in name.split(".")}
    return type(module) is type(net) and own == {name: p.shape for name, p in module.named_parameters()}


def _guard_averages() -> None:
    """Make ``AveragedModel`` refuse a network with seeds if the average has no seeds.

    ``AveragedModel.update_parameters`` pairs parameters by position, and would silently average a seed's
    parameters with those of another layer. torch has no hook for averaging, so ``update_parameters`` is
    wrapped, once.
    """
    update = AveragedModel.update_parameters
    if hasattr(update, "__wrapped__"):
        return

    @functools.wraps(update)
    def guarded(self: AveragedModel, model: nn.Module) -> None:
        if sum(1 for _ in self.module.parameters()) != sum(1 for _ in model.parameters()):
            grown = [slot.site.name for slot in slots_of(unwrapped(model)).values() if slot.graft is not None]
            if grown:
                raise HostError(
                    f"an AveragedModel of a {type(unwrapped(model)).__name__} does not follow its growth"
                    f" (seed in {grown[0]}) and would average its parameters out of step with a seed's;"
                    " name it: Growth(net, optimizer, follow=[averaged])"
                )
        update(self, model)

    AveragedModel.update_parameters = guarded  # type: ignore[method-assign]


# --- distributed training -----------------------------------------------------------------------------------


class ProcessGroup:
    """Synchronises seeds under ``DistributedDataParallel``: equal initial weights in all processes, and
    gradients averaged after backward.

    ``DistributedDataParallel`` averages only the gradients of parameters that existed when it was
    constructed. Gradients of seeds are averaged at the end of backward and not in a step pre-hook, because
    gradient clipping and a scaler's check for infinities run before the step. Gradient accumulation needs no
    extra code: averaging an accumulated gradient again leaves the contribution of earlier batches
    unchanged."""

    def __init__(self, passed: nn.Module) -> None:
        net = unwrapped(passed)
        is_wrapped = isinstance(getattr(passed, "_orig_mod", passed), DistributedDataParallel)
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.is_active = several and is_wrapped
        self._net = net
        self._hooked: dict[nn.Parameter, RemovableHandle] = {}
        self._queued = False
        self._watch = net.register_forward_pre_hook(self._look) if several and not is_wrapped else None

    def _look(self, _module: nn.Module, _args: Any) -> None:
        """Find the ``DistributedDataParallel`` wrapper that runs the network, if the caller did not pass the
        wrapper.
        """
        wrapper = DistributedDataParallel._active_ddp_module
        if wrapper is not None and unwrapped(wrapper) is self._net:
            self.is_active = True
            self.close()

    @property
    def hooks(self) -> list[Any]:
        """Hooks of all parameters whose gradients are averaged, one dict per parameter."""
        return [parameter._post_accumulate_grad_hooks for parameter in self._hooked]

    def close(self) -> None:
        """Stop looking for a ``DistributedDataParallel`` wrapper."""
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    def agreed(self, value: Any) -> Any:
        """Return, in every process, the ``value`` that process 0 passed."""
        if not self.is_active:
            return value
        holder = [value]
        dist.broadcast_object_list(holder, src=0)
        return holder[0]

    def check_single(self, name: str) -> None:
        """Raise HostError if several processes train the network, for an argument that draws new weights."""
        if self.is_active:
            raise HostError(
                f"{name} would draw other weights in every process; use it before DistributedDataParallel"
                " wraps the network"
            )

    def seed_planted(self, _slot: int, graft: Graft) -> None:
        """Copy the new seed's weights from process 0, and average its gradients after every backward pass."""
        if self.is_active:
            for tensor in graft.tensors():
                dist.broadcast(tensor.detach(), src=0)
            for parameter in graft.parameters():
                self._hooked[parameter] = parameter.register_post_accumulate_grad_hook(self._queue)

    def seed_removed(self, _slot: int, graft: Graft) -> None:
        """Stop averaging the gradients of the removed seed."""
        for parameter in graft.parameters():
            if handle := self._hooked.pop(parameter, None):
                handle.remove()

    def rank_raised(self, slot: int, graft: Graft) -> None:
        """Copy the weights of the seed, of which the new ones are random, from process 0."""
        if not self.is_active:
            return
        if any(parameter not in self._hooked for parameter in graft.parameters()):
            raise HostError(
                f"the seed in slot {graft.site.name} is older than its DistributedDataParallel, which keeps"
                " buffers of the present rank; raise the rank first, then wrap the network"
            )
        for tensor in graft.tensors():
            dist.broadcast(tensor.detach(), src=0)

    def _queue(self, _parameter: Tensor) -> None:
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        self._queued = False
        for parameter in self._hooked:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
