"""What stands around a user's network: wrappers, copies that are averaged, other processes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from esper.leyline.errors import HostError

_SHARDED: Final = ("FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")


def unwrapped(net: Any) -> nn.Module:
    """The user's own module under ``torch.compile`` and ``DistributedDataParallel``."""
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


def averages() -> Iterator[AveragedModel]:
    """Every ``AveragedModel`` of this process. Looks through all objects: about a tenth of a second."""
    return (each for each in gc.get_objects() if issubclass(type(each), AveragedModel))


def is_distributed(net: nn.Module) -> bool:
    """Whether some ``DistributedDataParallel`` of several processes runs ``net``."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    wrappers = (each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel))
    return any(unwrapped(each) is net for each in wrappers)


def recompile_limits_hit() -> int:
    """How often torch.compile has given up on a function that changed too often, in this process."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return 0
    return sum(n for what, n in dynamo.utils.counters["unimplemented"].items() if "recompile limit" in what)


def broadcast(tensors: Iterable[Tensor]) -> None:
    """Every process takes the values of the first."""
    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=0)


def from_first(value: Any) -> Any:
    """What the first process has for ``value``, in every process."""
    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


class GradientAverage:
    """Means of the seeds' gradients over processes, at the end of every backward.

    ``DistributedDataParallel`` knows only the parameters that it was built with. At the end of backward and
    not in a step pre-hook: own clipping and a scaler's check for infinities stand between the two, and with
    gradients that differ they would treat the network differently in every process. The mean of a sum that
    contains earlier means is the mean of the sum, so accumulation needs nothing more.
    """

    def __init__(self) -> None:
        self._hooked: dict[nn.Parameter, RemovableHandle] = {}
        self._queued = False

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            self._hooked[parameter] = parameter.register_post_accumulate_grad_hook(self._queue)

    def remove(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if handle := self._hooked.pop(parameter, None):
                handle.remove()

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
