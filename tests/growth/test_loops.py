"""Common training loops, in which a seed must learn like an ordinary layer added by hand."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler
from torch.utils.checkpoint import checkpoint

import esper
from esper.kasmina import register_blueprint
from esper.kasmina.blueprints import unregister_blueprint

STEPS, BIRTH = 7, 2
"""Number of optimiser steps in a training, and number of steps before the seed is planted."""


class Drop(nn.Sequential):
    """Seed with dropout whose last layer starts at zero."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width), nn.Dropout(0.5), nn.Linear(width, width))
        nn.init.zeros_(self[2].weight)
        nn.init.zeros_(self[2].bias)


@pytest.fixture(autouse=True)
def _drop():
    register_blueprint("drop", topology="features")(Drop)
    yield
    unregister_blueprint("drop", "features")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.drop = nn.Linear(8, 8), nn.Dropout(0.25)

    def forward(self, h: Tensor) -> Tensor:
        return self.drop(torch.relu(self.lin(h)))


class Net(nn.Module):
    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(5, 8), Block(), nn.Linear(8, 3)
        self.recompute = recompute

    def run_block(self, h: Tensor) -> Tensor:
        return self.block(h)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.stem(x))
        if self.recompute:
            h = checkpoint(self.run_block, h, use_reentrant=self.recompute == "reentrant")
        else:
            h = self.run_block(h)
        return self.head(h)


class ByHand(Net):
    """Reference network, in which the seed is an ordinary layer."""

    def __init__(self, recompute: str = "") -> None:
        super().__init__(recompute)
        self.extra = nn.ModuleList()
        self.grown = False

    def run_block(self, h: Tensor) -> Tensor:
        h = self.block(h)
        return h + self.extra[0](h) if self.grown else h


@dataclass
class Loop:
    """Settings of a training loop: optimiser, scheduler, accumulation, clipping, precision, compilation."""

    optimiser: Callable[[nn.Module], Optimizer] = lambda net: AdamW(net.parameters(), lr=0.05)
    scheduler: Callable[[Optimizer], Any] | None = None
    accumulate: int = 1
    clip: float = 0.0
    autocast: bool = False
    scale: float = 0.0
    recompute: str = ""
    compile: str = ""
    """Backend of torch.compile, and whether to compile "before" or "after" ``Growth`` is constructed."""


def no_decay(net: nn.Module) -> Optimizer:
    named = list(net.named_parameters())
    return AdamW(
        [
            {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.5, "lr": 0.05},
            {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0, "lr": 0.02},
        ]
    )


def head_faster(net: Net) -> Optimizer:
    """Return an optimiser whose learning rate for the head is ten times that of the other layers."""
    body = [p for name, p in net.named_parameters() if not name.startswith("head")]
    return SGD([{"params": body, "lr": 0.02}, {"params": net.head.parameters(), "lr": 0.2}], momentum=0.9)


LOOPS: dict[str, Loop] = {
    "AdamW": Loop(),
    "groups without decay": Loop(no_decay),
    "groups of layers": Loop(head_faster),
    "LambdaLR": Loop(scheduler=lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.7**step)),
    "OneCycle": Loop(head_faster, lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=STEPS)),
    "cosine": Loop(no_decay, lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS)),
    "plateau": Loop(scheduler=lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5)),
    "warm restarts": Loop(scheduler=lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3)),
    "accumulation": Loop(accumulate=2),
    "own clipping": Loop(clip=0.1),
    "autocast bf16": Loop(autocast=True),
    "GradScaler": Loop(scale=1024.0, clip=0.1),
    "checkpointing": Loop(recompute="no reentrant"),
    "reentrant checkpointing": Loop(recompute="reentrant"),
    "compiled before": Loop(compile="aot_eager before"),
    "compiled after": Loop(compile="aot_eager after"),
}


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 5, generator=generator), torch.randint(3, (6,), generator=generator))
        for _ in range(2 * STEPS)
    ]


def train(loop: Loop, net: nn.Module, optimiser: Optimizer, grow: Callable[[], None]) -> None:
    """Train in a user's loop; ``grow`` is called once, between two optimiser steps."""
    scheduler = loop.scheduler(optimiser) if loop.scheduler else None
    scaler = torch.amp.GradScaler("cpu", init_scale=loop.scale, enabled=bool(loop.scale))
    data = iter(batches())
    torch.manual_seed(2)
    for step in range(STEPS):
        if step == BIRTH:
            grow()
        for _ in range(loop.accumulate):
            x, y = next(data)
            with torch.autocast("cpu", torch.bfloat16) if loop.autocast else nullcontext():
                loss = nn.functional.cross_entropy(net(x), y) / loop.accumulate
            scaler.scale(loss).backward()
        if loop.clip:
            scaler.unscale_(optimiser)
            nn.utils.clip_grad_norm_(net.parameters(), loop.clip)
        scaler.step(optimiser)
        scaler.update()
        optimiser.zero_grad()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss.item())
        elif scheduler is not None:
            scheduler.step()


@pytest.mark.parametrize("name", LOOPS)
def test_seed_learns_like_an_ordinary_layer_added_to_the_network_by_hand(name: str) -> None:
    loop = LOOPS[name]
    torch.manual_seed(0)
    net = Net(loop.recompute)
    reference = ByHand(loop.recompute)
    reference.load_state_dict(net.state_dict())
    born = nn.ModuleList([Drop(8)])
    backend, _, when = loop.compile.partition(" ")

    run = net
    if when == "before":
        run = torch.compile(net, backend=backend)
        run(batches()[0][0])
    optimiser = loop.optimiser(net)
    growth = esper.Growth(run, optimiser, sample=batches()[0][0], slots="block", controller=None, mode="max")
    if when == "after":
        run = torch.compile(net, backend=backend)

    def grow() -> None:
        position = torch.get_rng_state()
        growth.germinate("block", "drop")
        torch.set_rng_state(position)
        seed = growth.network.slots[0].seed
        seed.load_state_dict(born[0].state_dict())

    train(loop, run, optimiser, grow)

    reference.extra = born
    theirs = loop.optimiser(reference)
    train(loop, reference, theirs, lambda: setattr(reference, "grown", True))
    wanted = {k: v for k, v in reference.state_dict().items() if not k.startswith("extra")}
    found = {k: v for k, v in net.state_dict().items() if "esper_slot" not in k}
    exact = {"rtol": 1e-4, "atol": 1e-5} if loop.compile or loop.clip else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(found, wanted, **exact)
    seed = growth.network.slots[0].seed
    torch.testing.assert_close(seed.state_dict(), reference.extra[0].state_dict(), **exact)
