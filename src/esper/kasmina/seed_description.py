"""Descriptions of seeds as tensors of bytes, from which a seed with arbitrary weights can be built."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from esper.leyline.factored_actions import BLEND_IDS


def description_of(blueprint: str, style: int, rank: int | None = None, *, is_causal: bool = True) -> Tensor:
    """Encode a seed as a tensor of bytes, because file formats for weights store tensors only.

    Args:
        blueprint: Name of the blueprint.
        style: Index of the blend style.
        rank: Raised rank; None for a seed as its blueprint builds it.
        is_causal: Whether attention in the seed is causal.
    """
    values: list[Any] = [blueprint, BLEND_IDS[style]]
    if not is_causal:
        values += [rank, is_causal]
    elif rank is not None:
        values.append(rank)
    return torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)


def described(description: Tensor) -> tuple[str, int]:
    """Return the blueprint and the style index that a byte tensor of ``description_of`` encodes."""
    blueprint, style, *_ = json.loads(bytes(description.tolist()))
    return blueprint, BLEND_IDS.index(style)


def described_rank(description: Tensor) -> int | None:
    """Return the raised rank that a byte tensor of ``description_of`` encodes, or None."""
    _, _, *rank = json.loads(bytes(description.tolist()))
    return rank[0] if rank else None


def described_causality(description: Tensor) -> bool:
    """Return whether attention is causal in the seed that a byte tensor of ``description_of`` encodes."""
    _, _, *rest = json.loads(bytes(description.tolist()))
    return rest[1] if len(rest) > 1 else True
