"""Handshake of a training's processes: all must be present, with the same settings and versions."""

import json
import socket
import time
from collections.abc import Mapping
from typing import Final
from uuid import uuid4

from torch.distributed.distributed_c10d import Store

from esper.leyline.errors import EsperError

POLL_SECONDS: Final = 0.02
"""Pause of rank 0 between two reads of the handshake store, in seconds."""


class HandshakeError(EsperError):
    """Error: processes of the training are missing, or have different settings or versions."""


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
    return _receive(store, world_size, common, seconds) if rank == 0 else _report(store, rank, common)


def _report(store: Store, rank: int, common: Mapping[str, object]) -> str:
    """Send the settings of this process to rank 0 and return the group name that rank 0 sends back."""
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
    ours = json.loads(json.dumps(common))  # JSON turns tuples into lists; received settings were JSON, too.
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
