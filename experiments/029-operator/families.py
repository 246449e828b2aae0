"""Families of tasks for the study of the operator: each grows a copy of its residual block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from esper.kasmina.host import Host
from esper.tolaria.data import GuardedTest, Samples, Scale, Splits
from esper.tolaria.tasks import task_named
from esper.tolaria.tasks.images import fashion14
from esper.tolaria.tasks.spec import InstanceDistribution, TaskSpec, regression
from esper.tolaria.twin import cache_folder

SLOTS = 1
STEPS = 40


class MLPBlock(nn.Module):
    """Pre-norm residual block of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.change = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, h: Tensor) -> Tensor:
        return h + self.change(h)


class MLPHost(Host):
    """Residual MLP on flat features."""

    topology = "features"
    block_kind = MLPBlock

    def __init__(self, inputs: int, width: int, blocks: int, outputs: int) -> None:
        super().__init__()
        self.spec = {"inputs": inputs, "width": width, "blocks": blocks, "outputs": outputs}
        self.feature_shapes = ((width,),) * SLOTS
        trunk = [nn.Flatten(), nn.Linear(inputs, width), *(MLPBlock(width) for _ in range(blocks))]
        between = [nn.Identity() for _ in range(SLOTS - 1)]
        head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, outputs))
        self.segments = nn.ModuleList([nn.Sequential(*trunk), *between, head])


class ViTBlock(nn.Module):
    """Pre-norm transformer block without a causal mask."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, h: Tensor) -> Tensor:
        n, t, w = h.shape
        q, k, v = self.qkv(self.norm1(h)).view(n, t, 3, 4, w // 4).permute(2, 0, 3, 1, 4)
        h = h + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, w))
        return h + self.mlp(self.norm2(h))


class Patches(nn.Module):
    """Patches of 2×2 pixels as tokens, with learned positions."""

    def __init__(self, width: int, tokens: int, channels: int) -> None:
        super().__init__()
        self.project = nn.Linear(4 * channels, width)
        self.position = nn.Parameter(torch.randn(tokens, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(F.unfold(x.contiguous(), 2, stride=2).transpose(1, 2)) + self.position


class MeanHead(nn.Module):
    """Mean over the tokens, then a linear layer."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, h: Tensor) -> Tensor:
        return self.linear(self.norm(h).mean(dim=1))


class ViTHost(Host):
    """Small vision transformer."""

    topology = "tokens"
    block_kind = ViTBlock

    def __init__(self, side: int, channels: int, width: int, blocks: int, classes: int) -> None:
        super().__init__()
        tokens = (side // 2) ** 2
        self.spec = {"side": side, "width": width, "blocks": blocks}
        self.feature_shapes = ((tokens, width),) * SLOTS
        trunk = [Patches(width, tokens, channels), *(ViTBlock(width) for _ in range(blocks))]
        between = [nn.Identity() for _ in range(SLOTS - 1)]
        self.segments = nn.ModuleList([nn.Sequential(*trunk), *between, MeanHead(width, classes)])


@cache
def _cifar16(folder: Path) -> tuple[Tensor, Tensor]:
    """Return all images of class folders at 16×16 pixels, as bytes; decoded once and kept in the cache."""
    kept = cache_folder("operator") / "cifar16.npz"
    if not kept.exists():
        pixels, classes = [], []
        names = sorted(path for path in (folder / "train").iterdir() if path.is_dir())
        for number, name in enumerate(names):
            for path in sorted(name.glob("*.jpg")):
                small = Image.open(path).convert("RGB").resize((16, 16), Image.Resampling.BOX)
                pixels.append(np.asarray(small).transpose(2, 0, 1))
                classes.append(number)
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.savez(kept, images=np.stack(pixels), labels=np.array(classes))
    with np.load(kept) as archive:
        return torch.from_numpy(archive["images"]), torch.from_numpy(archive["labels"])


def _image_loader(source: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[torch.Generator], Splits]:
    def load(generator: torch.Generator) -> Splits:
        images, labels = source()
        order = torch.randperm(len(labels), generator=generator)
        train, held_out, test = order.split([len(labels) - 9216, 1024, 8192])
        scale = Scale.of(images[train])
        parts = [Samples(images, labels, index, scale) for index in (train, held_out, test)]
        return Splits(parts[0], parts[1], GuardedTest(parts[2]))

    return load


@cache
def _teacher() -> tuple[Tensor, Tensor]:
    """Return features, and the output of a random network with 4 residual blocks of width 24 on them."""
    generator = torch.Generator().manual_seed(20_250)
    x = torch.randn(60_000, 16, generator=generator)
    h = x @ torch.randn(16, 24, generator=generator) / 4
    for _ in range(4):
        first = torch.randn(24, 48, generator=generator) / 24**0.5
        h = h + torch.tanh(2 * h @ first) @ torch.randn(48, 24, generator=generator) / 48**0.5
    y = h @ torch.randn(24, 4, generator=generator) / 24**0.5
    return x, (y - y.mean(0)) / y.std(0)


def _teacher_splits(generator: torch.Generator) -> Splits:
    x, y = _teacher()
    train, held_out, test = torch.randperm(len(x), generator=generator).split([len(x) - 9216, 1024, 8192])
    return Splits(Samples(x, y, train), Samples(x, y, held_out), GuardedTest(Samples(x, y, test)))


def families(cifar: Path, blocks: int = 1) -> dict[str, TaskSpec]:
    """Return the task of every family, with hosts of ``blocks`` blocks."""
    text, image = task_named("pycode_scaling"), task_named("fashion_scaling")
    base = {"horizon": STEPS, "name": ""}

    def trunk(width: int, rate: float) -> InstanceDistribution:
        """Return the only instance of a family."""
        return InstanceDistribution(widths=((width,) * SLOTS,), learning_rates=(rate,), trunks=(blocks,))

    flat = replace(image, host="cnn", **base)
    tasks = {
        "text": replace(text, **base, instances=trunk(32, 8e-3), budget=300 * 10**9),
        "fashion": replace(image, **base, instances=trunk(8, 4e-3), batch_size=64, budget=150 * 10**9),
        "cifar": replace(
            image,
            **base,
            input_shape=(3, 16, 16),
            load=_image_loader(lambda: _cifar16(cifar)),
            instances=trunk(16, 4e-3),
            batch_size=64,
            budget=300 * 10**9,
        ),
        "mlp": replace(
            flat,
            input_shape=(16,),
            classes=0,
            load=_teacher_splits,
            objective=regression(_teacher()[1]),
            instances=trunk(32, 6e-3),
            batch_size=64,
            build=lambda: MLPHost(16, 32, blocks, 4),
            budget=12 * 10**9,
        ),
        "vit": replace(
            flat,
            load=_image_loader(lambda: tuple(fashion14()[0])),
            instances=trunk(32, 3e-3),
            build=lambda: ViTHost(14, 1, 32, blocks, 10),
            budget=200 * 10**9,
        ),
    }
    return {name: replace(task, name=f"operator_{name}") for name, task in tasks.items()}
