"""Exchange of rollouts between the processes of a policy training, in the order of environments.

Every process gets all rollouts, which are small, and computes the same policy update. No gradients are
exchanged, so on CPUs the trained policy is bit-identical for any number of processes.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from esper.simic.training.handshake import agree_on_group

T = TypeVar("T")

_store: Store | None = None
_works = itertools.count()


def join(store: Store, rank: int, world_size: int, common: Mapping[str, object], seconds: float) -> None:
    """Run the handshake and join the process group; the arguments are those of ``agree_on_group``."""
    global _store  # noqa: PLW0603 - one per process, like the process group
    _store = PrefixStore(agree_on_group(store, rank, world_size, common, seconds), store)
    dist.init_process_group("gloo", store=_store, rank=rank, world_size=world_size)


def rank() -> int:
    """Return the rank of this process, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes of the training, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def claim(count: int) -> Iterator[int]:
    """Yield the numbers of the parts that this process has to run, out of ``count`` parts of the work.

    Parts are assigned dynamically, since episodes differ in cost: a process that has finished a part takes
    the next part. Each part must have the same result in every process.
    """
    if _store is None:
        yield from range(count)
        return
    work = f"parts of work {next(_works)}"  # All processes call ``claim`` equally often.
    while (part := _store.add(work, 1) - 1) < count:
        yield part


def gather(own: Mapping[int, T]) -> list[T]:
    """Return the results of all parts, given the results ``own`` of this process, in order."""
    everywhere: list[Mapping[int, T]] = [own] * world_size()
    if world_size() > 1:
        dist.all_gather_object(everywhere, dict(own))
    merged = {part: result for results in everywhere for part, result in results.items()}
    return [merged[part] for part in sorted(merged)]


def from_first(value: T) -> T:
    """Return in every process the ``value`` that was passed on rank 0."""
    if world_size() == 1:
        return value
    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def unlike_first(value: object) -> list[int]:
    """Return in every process the ranks whose ``value`` differs from that of rank 0."""
    values = gather({rank(): value})
    return [number for number, other in enumerate(values) if other != values[0]]
