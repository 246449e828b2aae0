"""Pairs of a network and its data, drawn from a number, for asking where capacity would help.

Four families: an MLP and a small CNN on data of a random teacher, a CNN on the embedded digits, a GPT on
Python source. ``intent`` only steers the draw; what kind a pair is, its measured truth says.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.tolaria.tasks.digits import load_digits
from esper.tolaria.tasks.text import PYCODE_SCALING

INTENTS = ("place", "nothing", "longer")
Data = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Pair:
    """A network to be trained for ``steps``, its data, and the places at which it could be grown."""

    name: str
    build: Callable[[], nn.Module]
    train: Data
    val: Data
    test: Data
    """Truth is measured on it; nobody else sees it."""
    loss: Loss
    places: tuple[str, ...]
    blueprint: str
    """Of the seed that is tried at every place."""
    steps: int
    """Minibatches of the host before anybody asks."""
    decays: bool
    """The host's rate falls to zero towards its end; a host that was stopped early has not got there."""
    more_steps: int
    """Minibatches that follow, with a seed or without."""
    rate: float
    batch: int


class Early:
    """How long a host of a given intent is trained: ``full`` steps, or a small share of them."""

    def __init__(self, rng: np.random.Generator, intent: str, full: int) -> None:
        self.stopped = intent == "longer"
        self.steps = int(full * rng.uniform(0.04, 0.15)) if self.stopped else full


def stages(layers: list[nn.Module], head: nn.Module) -> nn.Sequential:
    named = [(f"stage{i}", layer) for i, layer in enumerate(layers)]
    return nn.Sequential(OrderedDict([*named, ("head", head)]))


# --- MLP on a random teacher -----------------------------------------------------------------------


def mlp_pair(rng: np.random.Generator, intent: str) -> Pair:
    """A teacher of nonlinear features of x; the student narrows to few units between wide stages.

    Where the wide stage before the narrow one is linear, nothing behind can find these features again.
    """
    inputs, narrow = 16, int(rng.integers(2, 5))
    wide = int(rng.choice([20, 24, 32]))
    before = bool(rng.integers(2))
    noise = float(
        rng.uniform(0.6, 1.2) if intent == "nothing" and rng.integers(2) else rng.uniform(0.02, 0.2)
    )
    samples = 3000
    x = torch.from_numpy(rng.standard_normal((samples + 4000, inputs)).astype(np.float32))
    teacher = [
        torch.from_numpy(rng.standard_normal(s).astype(np.float32)) for s in ((inputs, 24), (24, narrow))
    ]
    if before:  # few features, each a nonlinear function of all inputs
        y = torch.tanh(F.relu(x @ teacher[0] / 2) @ teacher[1] / 4)
    else:  # a rugged function of few linear features
        y = torch.sin(2 * (x @ (teacher[0] @ teacher[1]) / 24))
    y = y / y.std(0) + noise * torch.from_numpy(rng.standard_normal((len(x), y.shape[1])).astype(np.float32))
    outputs = y.shape[1]

    def sound() -> nn.Module:
        layers = [
            nn.Linear(inputs, 64),
            nn.Sequential(nn.ReLU(), nn.Linear(64, 64)),
            nn.Sequential(nn.ReLU(), nn.Linear(64, 64)),
        ]
        return stages(layers, nn.Sequential(nn.ReLU(), nn.Linear(64, outputs)))

    def lacking() -> nn.Module:
        layers = [
            nn.Linear(inputs, wide),
            nn.Linear(wide, narrow + 1),
            nn.Linear(narrow + 1, wide)
            if not before
            else nn.Sequential(nn.Linear(narrow + 1, wide), nn.ReLU()),
        ]
        return stages(layers, nn.Linear(wide, outputs))

    early = Early(rng, intent, 600)
    return Pair(
        "mlp",
        lacking if intent == "place" else sound,
        (x[:samples], y[:samples]),
        (x[samples : samples + 1000], y[samples : samples + 1000]),
        (x[samples + 1000 :], y[samples + 1000 :]),
        F.mse_loss,
        ("stage0", "stage1", "stage2"),
        "mlp_small",
        early.steps,
        not early.stopped,
        300,
        float(rng.choice([2e-3, 4e-3])),
        64,
    )


# --- CNN ------------------------------------------------------------------------------------------------


def cnn(kernels: tuple[int, ...], width: int, channels: int, outputs: int, norm: bool) -> nn.Module:
    """Stages of one convolution each; ReLU and pooling stand at the beginning of the next one."""
    layers: list[nn.Module] = []
    for index, kernel in enumerate(kernels):
        conv = nn.Conv2d(channels if index == 0 else width, width, kernel, padding=kernel // 2)
        before: list[nn.Module] = [] if index == 0 else [nn.ReLU(), nn.AvgPool2d(2)]
        layers.append(nn.Sequential(*before, conv, *([nn.BatchNorm2d(width)] if norm else [])))
    head = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, outputs))
    return stages(layers, head)


def texture_pair(rng: np.random.Generator, intent: str) -> Pair:
    """Labels by a texture at one scale, which a student of 1×1 kernels sees with a seed at that scale."""
    scale, samples = int(rng.integers(0, 2)), 2000
    noise = float(
        rng.uniform(1.0, 1.6) if intent == "nothing" and rng.integers(2) else rng.uniform(0.05, 0.3)
    )
    x = torch.from_numpy(rng.standard_normal((samples + 3000, 1, 8, 8)).astype(np.float32))
    if scale:
        x = x + 0.7 * F.interpolate(
            torch.from_numpy(rng.standard_normal((len(x), 1, 4, 4)).astype(np.float32)), scale_factor=2
        )
    filters = torch.from_numpy(rng.standard_normal((3, 1, 3, 3)).astype(np.float32))
    filters = filters - filters.mean((2, 3), keepdim=True)
    seen = F.avg_pool2d(x, 2) if scale else x
    y = F.relu(F.conv2d(seen, filters, padding=1)).mean((2, 3))
    y = (y - y.mean(0)) / y.std(0)
    y = y + noise * torch.from_numpy(rng.standard_normal(tuple(y.shape)).astype(np.float32))
    width, norm = int(rng.choice([6, 8])), bool(rng.integers(2))
    kernels = (1, 1, 1) if intent == "place" else (3, 3, 3)
    early = Early(rng, intent, 500)
    return Pair(
        "texture",
        lambda: cnn(kernels, width if intent == "place" else 12, 1, 3, norm),
        (x[:samples], y[:samples]),
        (x[samples : samples + 1000], y[samples : samples + 1000]),
        (x[samples + 1000 :], y[samples + 1000 :]),
        F.mse_loss,
        ("stage0", "stage1", "stage2"),
        str(rng.choice(["conv_light", "conv_heavy"])),
        early.steps,
        not early.stopped,
        250,
        float(rng.choice([3e-3, 6e-3])),
        64,
    )


def digits_pair(rng: np.random.Generator, intent: str) -> Pair:
    """The embedded digits; kernels of 1×1 see no shapes, few images are learnt by heart."""
    parts = load_digits(torch.Generator().manual_seed(int(rng.integers(2**31))))
    train, val = parts.train, parts.validation
    parts.test.unlock()
    test = parts.test.read()
    few = int(rng.choice([300, 1077])) if intent == "nothing" else 1077
    kernels = (1, 1, 1) if intent == "place" else (3, 3, 3)
    width, norm = (int(rng.choice([4, 6, 8])) if intent == "place" else 12), bool(rng.integers(2))
    early = Early(rng, intent, 500)
    return Pair(
        "digits",
        lambda: cnn(kernels, width, 1, 10, norm),
        (train.x[:few], train.y[:few]),
        (val.x, val.y),
        (test.x, test.y),
        F.cross_entropy,
        ("stage0", "stage1", "stage2"),
        str(rng.choice(["conv_light", "conv_heavy"])),
        early.steps,
        not early.stopped,
        250,
        float(rng.choice([3e-3, 6e-3])),
        64,
    )


# --- GPT ------------------------------------------------------------------------------------------------


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.token(x) + self.position.weight[: x.shape[1]]


class Block(nn.Module):
    """Pre-norm, causal attention (none with 0 heads) and a feed-forward layer ``times`` as wide."""

    def __init__(self, width: int, heads: int, times: float) -> None:
        super().__init__()
        self.heads, hidden = heads, max(2, int(times * width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width) if heads else None
        self.out = nn.Linear(width, width) if heads else None
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, h: Tensor) -> Tensor:
        if self.qkv is not None and self.out is not None:
            q, k, v = self.qkv(self.norm1(h)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = h + self.out(mixed.transpose(1, 2).flatten(2))
        return h + self.mlp(self.norm2(h))


def next_token(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@cache
def _windows(rng_seed: int, context: int) -> tuple[Data, Data, Data]:
    parts = PYCODE_SCALING.load(torch.Generator().manual_seed(rng_seed))
    cut = lambda s: (s.x[:, :context].contiguous(), s.y[:, :context].contiguous())  # noqa: E731
    parts.test.unlock()
    test = parts.test.read()
    return cut(parts.train), cut(parts.validation), cut(test)


def _counts(rng: np.random.Generator, vocabulary: int, classes: int, context: int) -> tuple[Data, Data, Data]:
    """Which class the tokens so far vote for: a matter of attention, and of all the classes' votes."""
    tokens = torch.from_numpy(rng.integers(0, vocabulary, (3000, context)))
    votes = torch.from_numpy(rng.standard_normal((vocabulary, classes)).astype(np.float32))
    x, y = tokens, votes[tokens].cumsum(1).argmax(-1)
    return (x[:1700], y[:1700]), (x[1700:2000], y[1700:2000]), (x[2000:], y[2000:])


def gpt_pair(rng: np.random.Generator, intent: str) -> Pair:
    """Python source, or votes, for which a student without attention knows the last token alone."""
    lacks, context = intent == "place", 16
    train, val, test = _counts(rng, 16, 8, context) if lacks else _windows(int(rng.integers(4)), context)
    tokens, classes = (16, 8) if lacks else (128, 128)
    width = int(rng.choice([16, 24]))
    few = int(rng.choice([60, 120])) if intent == "nothing" else len(train[0])

    def build() -> nn.Module:
        layers: list[nn.Module] = [Embedding(tokens, context, width)]
        if lacks:  # four features in the middle
            layers += [nn.Linear(width, 4), nn.Sequential(nn.Linear(4, width), Block(width, 0, 0.5))]
        else:
            layers += [Block(width, 4, 2.0), Block(width, 4, 2.0)]
        return stages(layers, nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes)))

    early = Early(rng, intent, 300)
    return Pair(
        "gpt",
        build,
        (train[0][:few], train[1][:few]),
        val,
        test,
        next_token,
        ("stage0", "stage1", "stage2"),
        "attention" if lacks else str(rng.choice(["mlp_small", "attention"])),
        early.steps,
        not early.stopped,
        200,
        float(rng.choice([3e-3, 6e-3])),
        16,
    )


FAMILIES = (mlp_pair, texture_pair, digits_pair, gpt_pair)


def draw_pair(number: int) -> Pair:
    """The pair of this number; families and intents take turns."""
    rng = np.random.default_rng(number)
    return FAMILIES[number % 4](rng, INTENTS[number // 4 % 3])
