"""Exchange of shard results between the processes of a training, in shard order.

Every process gets all rollouts, which are small, and computes the same update. No gradients are exchanged, so
results are bit-identical for any number of processes.
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
    """Join the process group after the handshake; arguments as for ``agree_on_group``."""
    global _store  # noqa: PLW0603 - one per process, like the process group
    _store = PrefixStore(agree_on_group(store, rank, world_size, common, seconds), store)
    dist.init_process_group("gloo", store=_store, rank=rank, world_size=world_size)


def rank() -> int:
    """Return the rank of this process, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def claim(count: int) -> Iterator[int]:
    """Yield the numbers of the shards for this process, out of ``count`` shards.

    Shards are assigned dynamically, since episodes differ in length: a process that has finished a shard
    takes the next shard. The assignment does not affect the results.
    """
    if _store is None:
        yield from range(count)
        return
    work = f"shards of work {next(_works)}"  # Call numbers are equal in all processes.
    while (shard := _store.add(work, 1) - 1) < count:
        yield shard


def gather(own: Mapping[int, T]) -> list[T]:
    """Return the results of all shards from all processes, in shard order."""
    everywhere: list[Mapping[int, T]] = [own] * world_size()
    if world_size() > 1:
        dist.all_gather_object(everywhere, dict(own))
    merged = {shard: result for part in everywhere for shard, result in part.items()}
    return [merged[shard] for shard in sorted(merged)]


def from_first(value: T) -> T:
    """Return the value of rank 0 in every process."""
    if world_size() == 1:
        return value
    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def unlike_first(value: object) -> list[int]:
    """Return, in every process, the ranks whose value differs from the value of rank 0."""
    values = gather({rank(): value})
    return [number for number, other in enumerate(values) if other != values[0]]
