"""Train and merge an adapter for a frozen model, at the place and size that a diagnosis recommends.

    python examples/adapters.py

A small character model is trained on Python source code, frozen, and adapted to English prose.
"""

import inspect
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper

LENGTH, WIDTH = 32, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(text) + self.places.weight)))


def batches(text: str, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of 16 rows: (characters, next characters)."""
    codes = torch.tensor([min(ord(c), 127) for c in text[: count * 16 * LENGTH + 1]])
    x, y = codes[:-1].view(-1, LENGTH), codes[1:].view(-1, LENGTH)
    order = torch.randperm(len(x))
    return list(zip(x[order].split(16), y[order].split(16), strict=True))


def loss(logits: Tensor, text: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), text.flatten())


def train(net: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in data:
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()


@torch.no_grad()
def evaluate(net: nn.Module, data: list[tuple[Tensor, Tensor]]) -> float:
    return sum(loss(net(x), y).item() for x, y in data) / len(data)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    source = batches(inspect.getsource(inspect), 200)
    prose = batches("\n".join(topics.values()), 400)
    prose, held_out = prose[:350], prose[350:]
    net = GPT()
    train(net, torch.optim.AdamW(net.parameters(), lr=5e-3), 2 * source)
    net.requires_grad_(False)
    print(f"pretrained and frozen: {evaluate(net, held_out):.3f} on prose")

    # Find place and size. The control, training longer, changes nothing: all parameters are frozen.
    report = esper.diagnose(
        net,
        prose,
        held_out,
        loss=loss,
        slots=["blocks.*.qkv", "blocks.*.proj", "blocks.*.up", "blocks.*.down"],
        blueprints=["lora", "lora_large"],
    )
    print(report)
    if report.place is None:
        return

    # The adapter joins the empty group, so the optimiser trains only the adapter.
    optimizer = torch.optim.AdamW([{"params": []}], lr=5e-3)
    growth = esper.Growth(
        net, optimizer, sample=prose[0][0], mode="min", slots=[report.place], controller=None
    )
    print(growth.germinate(report.place, report.blueprint))
    train(net, optimizer, prose)
    adapted = evaluate(net, held_out)
    print(report.compare(net))

    merged = growth.finish(merge=True)  # adds the adapter to the weight of its Linear
    assert merged.state_dict().keys() == GPT().state_dict().keys()
    print(
        f"adapted: {adapted:.3f}; merged: {evaluate(merged, held_out):.3f}, {type(merged).__name__} as it was"
    )


if __name__ == "__main__":
    main()
