"""Bringing the shards of all processes together, in shard order.

Rollouts are small beside the training that makes them, so every process gets all of them and computes
the same update: no gradient crosses between processes, and their number changes no bit of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def rank() -> int:
    """This process's number; 0 writes what there is one of."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many processes share the run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def own_shards(count: int) -> list[int]:
    """The shards that this process runs, of ``count`` in all."""
    return list(range(rank(), count, world_size()))


def gather(own: Mapping[int, T]) -> list[T]:
    """The results of all shards from all processes, in shard order."""
    if world_size() == 1:
        return [own[shard] for shard in sorted(own)]
    everywhere: list[Mapping[int, T]] = [{} for _ in range(world_size())]
    dist.all_gather_object(everywhere, dict(own))
    merged = {shard: result for part in everywhere for shard, result in part.items()}
    return [merged[shard] for shard in sorted(merged)]
