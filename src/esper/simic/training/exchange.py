"""Bringing the shards of all processes together, in shard order.

Rollouts are small beside the training that makes them, so every process gets all of them and computes
the same update: no gradient crosses between processes, and their number changes no bit of the run.
"""

import itertools
import json
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Final, TypeVar
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from esper.leyline.errors import EsperError

POLL_SECONDS: Final = 0.02
"""Between two looks at who has come."""

T = TypeVar("T")

_store: Store | None = None
_works = itertools.count()


class MeetingError(EsperError):
    """Processes that did not come together, or do not belong together."""


def join(store: Store, rank: int, world_size: int, common: Mapping[str, object], seconds: float) -> None:
    """Become one of several processes once all have met; ``store`` is where they count the shards taken."""
    global _store  # noqa: PLW0603 - one per process, as the process group is
    _store = PrefixStore(meet(store, rank, world_size, common, seconds), store)
    dist.init_process_group("gloo", store=_store, rank=rank, world_size=world_size)


def meet(store: Store, rank: int, world_size: int, common: Mapping[str, object], seconds: float) -> str:
    """The name of a group of processes that are all there and have the same ``common``, setting by setting.

    The first waits ``seconds`` for the others. torchrun keeps one store for all groups that it starts, so the
    next group reads what a killed one left. Therefore every process leaves a nonce, and the first answers it
    with the name of the new group, below which there is nothing old.
    """
    return _receive(store, world_size, common, seconds) if rank == 0 else _report(store, rank, common)


def _report(store: Store, rank: int, common: Mapping[str, object]) -> str:
    """Be received by the first process."""
    nonce = uuid4().hex
    store.set(f"nonce/{rank}", nonce)
    group = store.get(f"group/{nonce}").decode()
    store.set(f"{group}/common/{rank}", json.dumps([socket.gethostname(), common]))
    if refusal := store.get(f"{group}/refusal").decode():
        raise MeetingError(refusal)
    return group


def _receive(store: Store, world_size: int, common: Mapping[str, object], seconds: float) -> str:
    """Wait for all other processes and compare them with this one."""
    group, deadline = uuid4().hex, time.monotonic() + seconds
    answered: set[str] = set()
    shown: dict[int, str] = {}
    while len(shown) < world_size - 1 and time.monotonic() < deadline:
        for rank in set(range(1, world_size)) - set(shown):
            nonce = _left(store, f"nonce/{rank}")
            if nonce and nonce not in answered:
                answered.add(nonce)
                store.set(f"group/{nonce}", group)
            if said := _left(store, f"{group}/common/{rank}"):
                shown[rank] = said
        time.sleep(POLL_SECONDS)
    refusal = _refusal(shown, world_size, common, seconds)
    store.set(f"{group}/refusal", refusal)
    if refusal:
        raise MeetingError(refusal)
    return group


def _refusal(shown: Mapping[int, str], world_size: int, common: Mapping[str, object], seconds: float) -> str:
    """What speaks against beginning; nothing if that is empty."""
    if missing := [str(rank) for rank in range(1, world_size) if rank not in shown]:
        return f"rank {', '.join(missing)} of {world_size} did not come within {seconds:g} s; start all again"
    ours = json.loads(json.dumps(common))  # as it reaches the others
    problems = []
    for rank, said in sorted(shown.items()):
        host, theirs = json.loads(said)
        problems += [
            f"{name} is {ours.get(name)} on rank 0 and {theirs.get(name)} on rank {rank} ({host})"
            for name in sorted({*ours, *theirs})
            if ours.get(name) != theirs.get(name)
        ]
    return f"all ranks need the same settings and versions; {'; '.join(problems)}" if problems else ""


def _left(store: Store, key: str) -> str:
    """What stands under a key, or nothing, without waiting for it."""
    return store.get(key).decode() if store.check([key]) else ""


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
