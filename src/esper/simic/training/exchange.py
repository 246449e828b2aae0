"""Bringing the shards of all processes together, in shard order.

Rollouts are small beside the training that makes them, so every process gets all of them and computes
the same update: no gradient crosses between processes, and their number changes no bit of the run.
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
    """Become one of several processes once all have met; ``store`` is where they count the shards taken."""
    global _store  # noqa: PLW0603 - one per process, as the process group is
    _store = PrefixStore(agree_on_group(store, rank, world_size, common, seconds), store)
    dist.init_process_group("gloo", store=_store, rank=rank, world_size=world_size)


def rank() -> int:
    """This process's number; 0 writes what there is one of."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many processes share the run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def claim(count: int) -> Iterator[int]:
    """Shards for this process, of ``count`` in all; the next one whenever it asks for more.

    Episodes differ in length, so whoever is done first takes the next shard: nobody waits for a process
    that was given the longer ones. Who runs a shard changes nothing in it.
    """
    if _store is None:
        yield from range(count)
        return
    work = f"shards of work {next(_works)}"  # the same number everywhere, since all do the same works
    while (shard := _store.add(work, 1) - 1) < count:
        yield shard


def gather(own: Mapping[int, T]) -> list[T]:
    """The results of all shards from all processes, in shard order."""
    if world_size() == 1:
        return [own[shard] for shard in sorted(own)]
    everywhere: list[Mapping[int, T]] = [{} for _ in range(world_size())]
    dist.all_gather_object(everywhere, dict(own))
    merged = {shard: result for part in everywhere for shard, result in part.items()}
    return [merged[shard] for shard in sorted(merged)]


def from_first(value: T) -> T:
    """What process 0 has, in every process; the others wait for it."""
    if world_size() == 1:
        return value
    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def unlike_first(value: object) -> list[int]:
    """The processes whose value is not that of process 0; all of them are told."""
    values = gather({rank(): value})
    return [number for number, other in enumerate(values) if other != values[0]]
