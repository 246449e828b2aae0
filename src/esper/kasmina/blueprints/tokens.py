"""Blueprints for tokens ``[batch, tokens, width]``; no token sees a later one.

As for feature maps: exactly zero at birth and alive with every weight from the first backward. What
has two layers is a pair of branches that cancel, together as large as its name says: the four heads
of attention are two in each branch, the rank and the hidden units are halved.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from esper.kasmina.blueprints.mirror import Mirrored
from esper.kasmina.blueprints.registry import register_blueprint

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Query, key and value ``[batch, heads, tokens, head size]`` to what each token gathered, same shape."""

HEADS = 4
"""Of attention, both branches together; the width of a slot must be a multiple."""
FLEX_MIN_HEAD_SIZE = 16
"""Flex attention has no kernel for smaller heads."""


@register_blueprint("norm", topology="tokens")
class TokenNorm(nn.Module):
    """tanh(s)·(LayerNorm(x) − x): moves each feature towards its normalised self, or away."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.scale = nn.Parameter(torch.zeros(width))

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.scale) * (self.norm(h) - h)


def low_rank(width: int, rank: int) -> Mirrored:
    """Low-rank adaptation (LoRA, Hu et al. 2022): a linear map of ``rank``, both branches together."""
    down, up = nn.Linear(width, rank // 2, bias=False), nn.Linear(rank // 2, width, bias=False)
    return Mirrored(down, up)


def feed_forward(width: int, times: int) -> Mirrored:
    """Linear → GELU → linear, ``times`` as wide as the slot in the middle, both branches together."""
    hidden = times * width // 2
    return Mirrored(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each token gathers from itself and the tokens before it; softmax of q·k / √(head size)."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def flex_causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same through a compiled flex attention, where that can be trained.

    That is on CUDA. On the CPU flex attention has no backward ("FlexAttention does not support
    backward on CPU"), so ``causal_attention`` runs there, and for heads that are too small.
    """
    if not query.is_cuda or query.shape[-1] < FLEX_MIN_HEAD_SIZE:
        return causal_attention(query, key, value)
    gathered: Tensor = _compiled_flex()(
        query, key, value, block_mask=_earlier_blocks(query.shape[-2], query.device)
    )
    return gathered


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    """Without the compiler flex attention would hold all scores of all tokens in memory."""
    return torch.compile(flex.flex_attention)


@cache
def _earlier_blocks(tokens: int, device: torch.device) -> flex.BlockMask:
    """Which blocks of a ``tokens`` × ``tokens`` table a causal attention has to look at."""

    def is_earlier(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return flex.create_block_mask(is_earlier, None, None, tokens, tokens, device=device)


class Heads(nn.Module):
    """Queries, keys and values side by side ``[batch, tokens, 3·heads·size]`` to ``[…, heads·size]``."""

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
    """Causal attention of four heads, each a quarter of the width: two branches of half the heads.

    No bias before the softmax: the key's would change nothing.
    """
    return Mirrored(
        nn.Linear(width, 3 * width // 2, bias=False), Heads(HEADS // 2, attend), nn.Linear(width // 2, width)
    )


register_blueprint("lora", "tokens")(partial(low_rank, rank=8))
register_blueprint("lora_large", "tokens")(partial(low_rank, rank=32))
register_blueprint("mlp_small", "tokens")(partial(feed_forward, times=2))
register_blueprint("mlp", "tokens")(partial(feed_forward, times=4))
register_blueprint("attention", "tokens", multiple_of=HEADS)(partial(attention, attend=causal_attention))
register_blueprint("flex_attention", "tokens", multiple_of=HEADS)(
    partial(attention, attend=flex_causal_attention)
)
