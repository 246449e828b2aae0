"""Blueprints for tokens ``[batch, tokens, width]`` and features ``[batch, width]``.

Each delta is exactly zero at birth, and every weight receives a gradient in the first backward pass. Several
layers are two branches that cancel (``Mirrored``), each with half of the heads, rank or hidden units. No
token depends on a later one. For features ``[batch, width]`` there are only the blueprints that treat each
token separately.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from esper.kasmina.blueprints.mirror import Mirrored
from esper.kasmina.blueprints.registry import Topology, register_blueprint

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention function of query, key and value ``[batch, heads, tokens, head size]``; the result has the same
shape.
"""

HEADS = 4
"""Number of attention heads of both branches together; the width of a slot must be a multiple of it."""
FLEX_MIN_HEAD_SIZE = 16
"""Smallest head size for which flex attention has a kernel."""


@register_blueprint("norm", topology="tokens")
@register_blueprint("norm", topology="features")
class TokenNorm(nn.Module):
    """Delta tanh(s)·(LayerNorm(x) − x): moves each feature towards its normalised value or away from it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.scale = nn.Parameter(torch.zeros(width))

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.scale) * (self.norm(h) - h)


def low_rank(width: int, rank: int) -> Mirrored:
    """Return a low-rank linear map (LoRA, Hu et al. 2022); ``rank`` is that of both branches together."""
    down, up = nn.Linear(width, rank // 2, bias=False), nn.Linear(rank // 2, width, bias=False)
    return Mirrored(down, up)


def feed_forward(width: int, times: int) -> Mirrored:
    """Return linear, GELU, linear, with ``times`` the width as hidden units of both branches together."""
    hidden = times * width // 2
    return Mirrored(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention: each token attends to itself and to earlier tokens."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def flex_causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention, computed by compiled flex attention on CUDA.

    On the CPU, where flex attention has no backward pass, and for small heads ``causal_attention`` is used.
    """
    if not query.is_cuda or query.shape[-1] < FLEX_MIN_HEAD_SIZE:
        return causal_attention(query, key, value)
    gathered: Tensor = _compiled_flex()(
        query, key, value, block_mask=_earlier_blocks(query.shape[-2], query.device)
    )
    return gathered


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    """Compile flex attention; uncompiled it stores the scores of all pairs of tokens."""
    return torch.compile(flex.flex_attention)


@cache
def _earlier_blocks(tokens: int, device: torch.device) -> flex.BlockMask:
    """Return the block mask of causal attention over ``tokens`` tokens."""

    def is_earlier(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return flex.create_block_mask(is_earlier, None, None, tokens, tokens, device=device)


class Heads(nn.Module):
    """Multi-head attention: concatenated q, k, v ``[batch, tokens, 3·heads·size]`` to ``[…, heads·size]``."""

    def __init__(self, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads = heads
        self.attend = attend

    def forward(self, qkv: Tensor) -> Tensor:
        query, key, value = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.attend(query, key, value).transpose(1, 2).flatten(2)

    def extra_repr(self) -> str:
        return f"{self.heads}, {self.attend.__name__}"


def attention(width: int, attend: Attend) -> Mirrored:
    """Return causal attention of four heads, two in each branch; a head has a quarter of the width.

    The projection to q, k and v has no bias: a bias of the key does not change the softmax.
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
register_blueprint("attention", "tokens", multiple_of=HEADS)(partial(attention, attend=causal_attention))
register_blueprint("flex_attention", "tokens", multiple_of=HEADS)(
    partial(attention, attend=flex_causal_attention)
)
