"""Three sound networks of different kinds with their data: an MLP on 192 columns, a GPT of one block and a
residual CNN; each can be built with one more block."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import process_time

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

Data = tuple[Tensor, Tensor]
CONTEXT, WIDTH, HEADS = 64, 48, 4
TRAINED_IMAGES, HELD_OUT_IMAGES = 20_000, 4_000


class MLP(nn.Module):
    """Hidden layers with dropout."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        widths = [192] + [128] * hidden
        layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Dropout(0.2)) for a, b in pairwise(widths)]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class TokenBlock(nn.Module):
    """Causal attention and a feed-forward layer, normalised before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(h)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        h = h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return h + self.down(F.gelu(self.up(self.norm2(h))))


class GPT(nn.Module):
    """Character GPT whose output layer is its token embedding."""

    def __init__(self, blocks: int, vocabulary: int = 65) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.blocks = nn.ModuleList(TokenBlock() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.token(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.norm(h) @ self.token.weight.T


class ImageBlock(nn.Module):
    """Residual block with BatchNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ResNet(nn.Module):
    """Two stages of residual blocks."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.stage1 = nn.Sequential(ImageBlock(16))
        self.down = nn.Sequential(nn.Conv2d(16, 32, 2, stride=2), nn.BatchNorm2d(32), nn.ReLU())
        self.stage2 = nn.Sequential(*(ImageBlock(32) for _ in range(blocks)))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stage2(self.down(self.stage1(self.stem(x)))).mean((2, 3)))


@dataclass
class Batches:
    """Loader of random minibatches; half of the minibatches of images are mirrored."""

    data: Data
    size: int
    generator: torch.Generator
    seconds: list[float] = field(default_factory=list)
    """CPU seconds of every complete pass, with all that its user does in it."""

    def __len__(self) -> int:
        return len(self.data[0]) // self.size

    def __iter__(self) -> Iterator[Data]:
        x, y = self.data
        began = process_time()
        for chosen in torch.randperm(len(x), generator=self.generator)[: len(self) * self.size].split(
            self.size
        ):
            is_mirrored = x.dim() == 4 and torch.rand((), generator=self.generator) < 0.5
            yield x[chosen].flip(-1) if is_mirrored else x[chosen], y[chosen]
        self.seconds.append(process_time() - began)


@dataclass(frozen=True)
class Case:
    """A network with its data and the settings of its training."""

    build: Callable[[int], nn.Module]
    """Function of the number of blocks."""
    train: Data
    validation: Data
    test: Data
    rate: float
    deeper_rate: float
    """Learning rate of the network with one more block."""
    batch: int
    epochs: int
    """Length of the training by ``grow``, which sets the seconds of the other arms."""


def next_token(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of classes or of tokens."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def text(folder: Path) -> tuple[Data, Data, Data]:
    """Return windows of the first 90 %, the next 5 % and the last 5 % of the text."""
    corpus = (folder / "tinyshakespeare.txt").read_text()
    known = {letter: index for index, letter in enumerate(sorted(set(corpus)))}
    tokens = torch.tensor([known[letter] for letter in corpus])
    cuts = [0, int(0.9 * len(tokens)), int(0.95 * len(tokens)), len(tokens)]
    return tuple(_windows(tokens[a:b]) for a, b in pairwise(cuts))  # type: ignore[return-value]


def _windows(tokens: Tensor) -> Data:
    count = (len(tokens) - 1) // CONTEXT * CONTEXT
    return tokens[:count].view(-1, CONTEXT), tokens[1 : count + 1].view(-1, CONTEXT)


def images(folder: Path) -> tuple[Data, Data, Data]:
    """Return images of 16×16 pixels: some of the training part, and two halves of some of the test part."""
    found: dict[str, list[tuple[np.ndarray, int]]] = {"train": [], "test": []}
    classes: dict[str, int] = {}
    wanted = {"train": TRAINED_IMAGES // 10, "test": 2 * HELD_OUT_IMAGES // 10}
    with tarfile.open(folder / "cifar10_jpg.tar.xz", "r|xz") as archive:
        for member in archive:
            part, *rest = member.name.split("/")
            if not member.isfile() or int(Path(rest[1]).stem) >= wanted[part]:
                continue
            file = archive.extractfile(member)
            assert file is not None
            small = Image.open(io.BytesIO(file.read())).convert("RGB").resize((16, 16), Image.Resampling.BOX)
            found[part].append((np.asarray(small), classes.setdefault(rest[0], len(classes))))
    order = np.random.default_rng(0).permutation(2 * HELD_OUT_IMAGES)
    held_out = [found["test"][i] for i in order]
    return (
        _tensors(found["train"]),
        _tensors(held_out[:HELD_OUT_IMAGES]),
        _tensors(held_out[HELD_OUT_IMAGES:]),
    )


def _tensors(found: list[tuple[np.ndarray, int]]) -> Data:
    x = torch.from_numpy(np.stack([image for image, _ in found])).permute(0, 3, 1, 2).float() / 127.5 - 1
    return x, torch.tensor([label for _, label in found])


def columns(data: Data) -> Data:
    """Return the means of 2×2 pixels in the three colours as 192 columns."""
    return 2 * F.avg_pool2d(data[0], 2).flatten(1), data[1]


def cases(folder: Path) -> dict[str, Case]:
    pictures, letters = images(folder), text(folder)
    table = [columns(part) for part in pictures]
    return {
        "MLP": Case(lambda n: MLP(n + 1), *table, 5e-4, 5e-4, 64, 65),
        "GPT": Case(GPT, *letters, 8e-3, 4e-3, 16, 7),
        "ResNet": Case(ResNet, *pictures, 3e-3, 3e-3, 64, 10),
    }
