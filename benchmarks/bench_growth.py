"""Time of a training step in a user's training loop, in three ratios: live seeds to the finished (plain)
network, empty slots to no slots, and an inserted block to a network written with that block.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.timing import cpu_times, ratio
from esper.growth import Growth
from tests.growth.models import BasicBlock

LIVE_LIMIT = 1.15
EMPTY_LIMIT = 1.01
DEPTH_LIMIT = 1.02
LEAST_STEP_MS = 10.0
"""The limits on the overhead apply only if a training step without slots takes at least this many
milliseconds.
"""
ITERATIONS = 30
"""Number of timing repetitions; it is large, because a limit of 1 % on the overhead needs a precise minimum
time.
"""


class WideResNet(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.layer1 = nn.Sequential(*(BasicBlock(16, 16) for _ in range(blocks)))
        self.layer2 = nn.Sequential(BasicBlock(16, 32, 2), BasicBlock(32, 32))
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


class Text(nn.Module):
    """Token model with an embedding, an ``nn.TransformerEncoder`` and a linear output layer."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=True, dropout=0.0)
        self.embed = nn.Embedding(64, 64)
        self.encoder = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)))


CASES: dict[str, tuple[Callable[..., nn.Module], Callable[[], Tensor], tuple[tuple[str, str], ...]]] = {
    "resnet": (
        WideResNet,
        lambda: torch.randn(48, 3, 16, 16),
        (("layer1", "conv_light"), ("layer2", "bottleneck")),
    ),
    "text": (
        Text,
        lambda: torch.randint(64, (48, 32)),
        (("encoder.layers.0", "mlp"), ("encoder.layers.1", "lora")),
    ),
}


def stepping(net: nn.Module, x: Tensor) -> Callable[[], None]:
    """Return a function that trains the network for one optimiser step on the minibatch ``x``."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    net.train()

    def step() -> None:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("name", CASES)
def bench_two_live_seeds_and_empty_slots(name: str) -> None:
    build, sample, seeds = CASES[name]
    torch.manual_seed(0)
    bare, x = build(), sample()
    empty, live, finished = (copy.deepcopy(bare) for _ in range(3))
    slots = [slot for slot, _ in seeds]
    growths = [
        Growth(net, torch.optim.AdamW(net.parameters()), sample=x, slots=slots, controller=None, mode="max")
        for net in (empty, live, finished)
    ]
    for growth in growths[1:]:
        for slot, blueprint in seeds:
            growth.germinate(slot, blueprint)
    growths[2].finish(merge=False)
    nets = {"bare": bare, "empty slots": empty, "live seeds": live, "finished": finished}
    times = cpu_times(
        {kind: stepping(net, x) for kind, net in nets.items()}, repeats=3, iterations=ITERATIONS
    )
    assert times["bare"] >= LEAST_STEP_MS
    ratio(f"own loop, {name}", times, "empty slots", "bare", at_most=EMPTY_LIMIT)
    ratio(f"own loop, {name}", times, "live seeds", "finished", at_most=LIVE_LIMIT)


@pytest.mark.parametrize(("name", "slot"), [("resnet", "layer1.1"), ("text", "encoder.layers.1")])
def bench_inserted_block(name: str, slot: str) -> None:
    build, sample, _ = CASES[name]
    torch.manual_seed(0)
    live, x, by_hand = build(), sample(), build(3)
    growth = Growth(
        live, torch.optim.AdamW(live.parameters()), sample=x, slots=slot, controller=None, mode="max"
    )
    growth.germinate(slot, "stack")
    assert sum(p.numel() for p in live.parameters()) == sum(p.numel() for p in by_hand.parameters())
    grown = copy.deepcopy(live)
    growth.finish()
    nets = {"written by hand": by_hand, "grown": grown, "grown and finished": live}
    times = cpu_times(
        {kind: stepping(net, x) for kind, net in nets.items()}, repeats=2, iterations=2 * ITERATIONS
    )
    assert times["written by hand"] >= LEAST_STEP_MS
    for kind in ("grown", "grown and finished"):
        ratio(f"one more block, {name}", times, kind, "written by hand", at_most=DEPTH_LIMIT)
