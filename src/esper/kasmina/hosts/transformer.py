"""Small GPT with pre-norm blocks, a tied embedding, and slots after all or some of the blocks."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.blueprints import Topology
from esper.kasmina.blueprints.tokens import Heads, dense_attention
from esper.kasmina.host import Host
from esper.leyline.errors import HostError


class Embedding(nn.Module):
    """Sum of token embedding and position embedding for tokens ``[batch, tokens]``."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(context, width))
        # The token embedding is also the output layer. With a much smaller initial standard deviation, the
        # logits of a narrow host would stay near zero for many steps.
        for weight in (self.token.weight, self.position):
            nn.init.normal_(weight, std=width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position[: tokens.shape[1]]


class Attention(nn.Module):
    """Causal self-attention: no token depends on a later one."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.heads = Heads(heads, dense_attention)
        self.out = nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        return self.out(self.heads(self.qkv(h)))


class Block(nn.Module):
    """Pre-norm residual block: attention, then a feed-forward network."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.before_feed_forward = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.dropout(self.attention(self.before_attention(h)))
        return h + self.dropout(self.feed_forward(self.before_feed_forward(h)))


class TiedHead(nn.Module):
    """LayerNorm, then an output layer that shares its weight with the token embedding."""

    def __init__(self, embedding: nn.Parameter) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(embedding.shape[1])
        # The output layer stores the shared parameter and not the embedding module. torch.func replaces
        # tensors by module, and would restore a wrong tensor if one module were registered under two names.
        self.embedding = embedding

    def forward(self, h: Tensor) -> Tensor:
        return F.linear(self.norm(h), self.embedding)


class TransformerHost(Host):
    """GPT of ``layers`` pre-norm blocks of one width; the outputs are logits of the next token."""

    topology: Topology = "tokens"
    block_kind = Block

    def __init__(
        self,
        *,
        vocabulary: int,
        context: int,
        width: int,
        layers: int,
        heads: int = 4,
        feed_forward: int = 4,
        slots_after: Sequence[int] | None = None,
        dropout: float = 0.0,
    ) -> None:
        """Build all layers of the GPT.

        Args:
            vocabulary: Number of different tokens.
            context: Largest number of tokens in an input.
            width: Number of features per token.
            layers: Number of pre-norm blocks.
            heads: Number of attention heads in each block.
            feed_forward: Hidden units of a block's feed-forward network, as a multiple of ``width``.
            slots_after: Layers that are followed by a slot, numbered from 0; all layers by default. A layer
                number that occurs several times is followed by several slots in series.
            dropout: Dropout probability of all layers.
        """
        super().__init__()
        sizes = {"vocabulary": vocabulary, "context": context, "width": width, "layers": layers}
        sizes |= {"heads": heads, "feed_forward": feed_forward}
        if min(sizes.values()) < 1:
            raise HostError(
                "a transformer host needs positive vocabulary, context, width, layers, heads and"
                f" feed_forward; found {', '.join(map(str, sizes.values()))}"
            )
        if width % heads:
            raise HostError(f"{heads} heads must divide the width; found a width of {width}")
        after = list(range(layers)) if slots_after is None else list(slots_after)
        if not after or after != sorted(after) or not 0 <= after[0] <= after[-1] < layers:
            raise HostError(
                f"slots stand after layers 0 to {layers - 1}, in order and at least one; found {after}"
            )
        self.spec = {**sizes, "slots_after": after, "dropout": dropout}
        self.feature_shapes = ((context, width),) * len(after)
        embedding = Embedding(vocabulary, context, width)
        tied = embedding.token.weight
        assert isinstance(tied, nn.Parameter)
        blocks = [Block(width, heads, feed_forward * width, dropout) for _ in range(layers)]
        ends = [layer + 1 for layer in after]
        parts: list[list[nn.Module]] = [[embedding, *blocks[: ends[0]]]]
        parts += [list(blocks[begin:end]) for begin, end in zip(ends, [*ends[1:], layers], strict=True)]
        parts[-1].append(TiedHead(tied))
        self.segments = nn.ModuleList(nn.Sequential(*part) if part else nn.Identity() for part in parts)

    def sample_input(self, batch: int) -> Tensor:
        tokens = torch.arange(batch * self.spec["context"]) % self.spec["vocabulary"]
        return tokens.view(batch, -1)
