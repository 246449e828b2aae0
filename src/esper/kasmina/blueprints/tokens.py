"""Blueprints for tokens ``[batch, tokens, width]`` and features ``[batch, width]``.

Each delta for tokens is exactly zero at birth, and every weight receives a gradient in the first backward
pass. A delta of several layers is the sum of two branches that cancel (``Mirrored``), each with half of the
heads, rank or hidden units. Only attention mixes tokens; it is causal, so that the output for a token does
not depend on later tokens, unless the slot states that the network is not causal. Features ``[batch, width]``
have no token axis, so only blueprints that treat each token separately exist for them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from esper.kasmina.blueprints.registry import Mirrored, Topology, register_blueprint

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""Function that computes attention from query, key and value ``[batch, heads, tokens, head size]``, causal or
not; the result has the same shape.
"""
MIXING: Final = ("attention", "flex_attention")
"""Blueprints for tokens whose seeds mix tokens."""

HEADS = 4
"""Total number of attention heads in the two branches of a seed; the width of its slot must be a multiple of
this number."""
FLEX_MIN_HEAD_SIZE = 16
"""Smallest head size for which flex attention has a kernel."""


@register_blueprint("norm", topology="tokens")
@register_blueprint("norm", topology="features")
class TokenNorm(nn.Module):
    """Seed with delta tanh(s)·(LayerNorm(x) − x); the learned scale s, one per feature, moves features
    towards or away from their normalised values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.scale = nn.Parameter(torch.zeros(width))

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.scale) * (self.norm(h) - h)


def low_rank(width: int, rank: int) -> Mirrored:
    """Return a low-rank linear map (LoRA, Hu et al. 2022) as the sum of two branches, each of half the
    rank."""
    down, up = nn.Linear(width, rank // 2, bias=False), nn.Linear(rank // 2, width, bias=False)
    return Mirrored(down, up)


def feed_forward(width: int, times: int) -> Mirrored:
    """Return the sum of two branches of linear layer, GELU and linear layer, each with ``times * width / 2``
    hidden units."""
    hidden = times * width // 2
    return Mirrored(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def dense_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = True) -> Tensor:
    """Compute attention: each token attends to all tokens or, if causal, to itself and to earlier tokens."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def flex_causal_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = True) -> Tensor:
    """Compute attention; causal attention on CUDA by compiled flex attention.

    On the CPU, where flex attention has no backward pass, for small heads, and if it is not causal,
    ``dense_attention`` is called instead.
    """
    if not (is_causal and query.is_cuda) or query.shape[-1] < FLEX_MIN_HEAD_SIZE:
        return dense_attention(query, key, value, is_causal)
    gathered: Tensor = _compiled_flex()(
        query, key, value, block_mask=_earlier_blocks(query.shape[-2], query.device)
    )
    return gathered


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    """Return compiled flex attention; uncompiled flex attention would store the scores of all pairs of
    tokens."""
    return torch.compile(flex.flex_attention)


@cache
def _earlier_blocks(tokens: int, device: torch.device) -> flex.BlockMask:
    """Return the block mask of causal attention over ``tokens`` tokens, for flex attention."""

    def is_earlier(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return flex.create_block_mask(is_earlier, None, None, tokens, tokens, device=device)


class Heads(nn.Module):
    """Multi-head attention from concatenated query, key and value ``[batch, tokens, 3·heads·size]`` to
    ``[batch, tokens, heads·size]``."""

    def __init__(self, heads: int, attend: Attend, *, is_causal: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.attend = attend
        self.is_causal = is_causal
        self.visible: Tensor | None = None
        """Which tokens are not padding, as ``[batch, 1, tokens, tokens]``, in the present forward pass; None
        if the slot sees no mask. Every token attends to itself, padding too."""

    def forward(self, qkv: Tensor) -> Tensor:
        query, key, value = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.visible is None:
            return self.attend(query, key, value, self.is_causal).transpose(1, 2).flatten(2)
        earlier = qkv.new_ones((qkv.shape[1], qkv.shape[1])).tril()
        allowed = self.visible & (earlier > 0) if self.is_causal else self.visible
        allowed = allowed | (earlier.triu() > 0)
        gathered = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        return gathered.transpose(1, 2).flatten(2)

    def extra_repr(self) -> str:
        return f"{self.heads}, {self.attend.__name__}"


@contextmanager
def showing(seed: nn.Module, visible: Tensor) -> Iterator[None]:
    """Let the attention heads of ``seed`` attend to the tokens in ``visible`` only, inside the context."""
    heads = [module for module in seed.modules() if isinstance(module, Heads)]
    try:
        for each in heads:
            each.visible = visible
        yield
    finally:
        for each in heads:
            each.visible = None


def attention(width: int, attend: Attend) -> Mirrored:
    """Return attention with four heads, two in each of its two branches; a head has a quarter of the
    slot's width.

    The projection to query, key and value has no bias, because a bias of the key does not change the softmax.
    """
    return Mirrored(
        nn.Linear(width, 3 * width // 2, bias=False), Heads(HEADS // 2, attend), nn.Linear(width // 2, width)
    )


_TOPOLOGIES: Final[tuple[Topology, ...]] = ("tokens", "features")
for _topology in _TOPOLOGIES:
    register_blueprint("lora", _topology)(partial(low_rank, rank=8))
    register_blueprint("lora_large", _topology)(partial(low_rank, rank=32))
    register_blueprint("mlp_small", _topology)(partial(feed_forward, times=2))
    register_blueprint("mlp", _topology)(partial(feed_forward, times=4))
register_blueprint("attention", "tokens", multiple_of=HEADS)(partial(attention, attend=dense_attention))
register_blueprint("flex_attention", "tokens", multiple_of=HEADS)(
    partial(attention, attend=flex_causal_attention)
)
