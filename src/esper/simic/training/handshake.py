"""How the processes of a training find each other, and make sure that they belong together."""

import json
import socket
import time
from collections.abc import Mapping
from typing import Final
from uuid import uuid4

from torch.distributed.distributed_c10d import Store

from esper.leyline.errors import EsperError

POLL_SECONDS: Final = 0.02
"""Between two looks at who has come."""


class HandshakeError(EsperError):
    """Processes that did not come together, or do not belong together."""


def agree_on_group(
    store: Store, rank: int, world_size: int, common: Mapping[str, object], seconds: float
) -> str:
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
        raise HandshakeError(refusal)
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
        raise HandshakeError(refusal)
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
