"""Processes of a policy training: handshake, and exchange of rollouts in the order of environments.

In the handshake all processes must be present, with the same settings and versions. Every process gets all
rollouts, which are small, and computes the same policy update. No gradients are exchanged, so on CPUs the
trained policy is bit-identical for any number of processes.
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

T = TypeVar("T")

_store: Store | None = None
_works = itertools.count()
POLL_SECONDS: Final = 0.02
"""Pause of rank 0 between two reads of the handshake store, in seconds."""


class HandshakeError(EsperError):
    """Error: processes of the training are missing, or have different settings or versions."""


# --- handshake ----------------------------------------------------------------------------------------


def agree_on_group(
    store: Store, rank: int, world_size: int, common: Mapping[str, object], seconds: float
) -> str:
    """Wait for all processes, compare their settings, and return the name of the process group.

    torchrun has one key-value store for all process groups that it starts, so the keys of a killed group
    remain. To avoid reading such keys, every process stores a nonce, and rank 0 stores the new group name
    under each nonce; all other keys start with the group name.

    Args:
        store: Key-value store of torchrun.
        rank: Rank of this process.
        world_size: Number of processes.
        common: Settings and versions that must be equal in all processes.
        seconds: Time that rank 0 waits for the other ranks.

    Raises:
        HandshakeError: A process is missing, or its settings or versions differ from those of rank 0.
    """
    if rank == 0:
        return _receive(store, world_size, common, seconds)
    nonce = uuid4().hex
    store.set(f"nonce/{rank}", nonce)
    group = store.get(f"group/{nonce}").decode()
    store.set(f"{group}/common/{rank}", json.dumps([socket.gethostname(), common]))
    if refusal := store.get(f"{group}/refusal").decode():
        raise HandshakeError(refusal)
    return group


def _receive(store: Store, world_size: int, common: Mapping[str, object], seconds: float) -> str:
    """Wait on rank 0 for the settings of all other ranks and compare them with the settings of rank 0."""
    group, deadline = uuid4().hex, time.monotonic() + seconds
    answered: set[str] = set()
    received: dict[int, str] = {}
    while len(received) < world_size - 1 and time.monotonic() < deadline:
        for rank in set(range(1, world_size)) - set(received):
            nonce = _value_of(store, f"nonce/{rank}")
            if nonce and nonce not in answered:
                answered.add(nonce)
                store.set(f"group/{nonce}", group)
            if settings := _value_of(store, f"{group}/common/{rank}"):
                received[rank] = settings
        time.sleep(POLL_SECONDS)
    refusal = _refusal(received, world_size, common, seconds)
    store.set(f"{group}/refusal", refusal)
    if refusal:
        raise HandshakeError(refusal)
    return group


def _refusal(
    received: Mapping[int, str], world_size: int, common: Mapping[str, object], seconds: float
) -> str:
    """Return the error message about missing ranks or different settings; empty if all ranks agree."""
    if missing := [str(rank) for rank in range(1, world_size) if rank not in received]:
        return f"rank {', '.join(missing)} of {world_size} did not come within {seconds:g} s; start all again"
    # JSON turns tuples into lists, so both settings are compared as JSON.
    ours = json.loads(json.dumps(common))
    problems = []
    for rank, settings in sorted(received.items()):
        host, theirs = json.loads(settings)
        problems += [
            f"{name} is {ours.get(name)} on rank 0 and {theirs.get(name)} on rank {rank} ({host})"
            for name in sorted({*ours, *theirs})
            if ours.get(name) != theirs.get(name)
        ]
    return f"all ranks need the same settings and versions; {'; '.join(problems)}" if problems else ""


def _value_of(store: Store, key: str) -> str:
    """Return the value of a key in the store without waiting; an empty string if the key is not set."""
    return store.get(key).decode() if store.check([key]) else ""


# --- exchange -----------------------------------------------------------------------------------------


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
    the next part. A part must have the same result, whichever process runs it.
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
