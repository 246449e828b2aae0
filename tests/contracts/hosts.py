"""Hosts of the contract tests, which test every blueprint on hosts with feature maps, tokens or features.

Every host in the contract tests has dropout before and after its first slot. Hosts named ``plain_*`` are
plain modules and not subclasses of ``Host``, so the shadow branch of an incubating seed repeats the whole
forward pass of the host.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from esper.kasmina import CNNHost, Host
from esper.kasmina.blueprints import Topology
from esper.kasmina.hosts import TransformerHost
from esper.kasmina.sites import Site, find_sites

CLASSES = 4
INPUT_SHAPE = (2, 4, 4)
VOCABULARY = 8
TOKENS = 5
INPUTS = 6
DROPOUT = 0.2

# --- feature maps -----------------------------------------------------------------------------


def _stage(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Dropout(DROPOUT),
    )


class BatchHost(Host):
    """Host as a user may write it, with batch normalisation and in-place activations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.topology: Topology = "feature_map"
        self.feature_shapes = ((width, 4, 4), (width, 2, 2))
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))
        body = nn.Sequential(nn.MaxPool2d(2), _stage(width, width))
        self.segments = nn.ModuleList([_stage(INPUT_SHAPE[0], width), body, head])


class PlainImages(nn.Module):
    """Image classifier with batch normalisation and two slots; its skip connection bypasses the second
    slot."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = _stage(INPUT_SHAPE[0], width)
        self.second = nn.Sequential(nn.MaxPool2d(2), _stage(width, width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head(h.mean(dim=(2, 3)) + self.second(h).mean(dim=(2, 3)))


# --- features and tokens ----------------------------------------------------------------------


def _layer(inputs: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Dropout(DROPOUT))


class FeatureHost(Host):
    """A multilayer perceptron of three layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.topology: Topology = "features"
        self.feature_shapes = ((width,), (width,))
        layers = [_layer(INPUTS, width), _layer(width, width), nn.Linear(width, CLASSES)]
        self.segments = nn.ModuleList(layers)


class PlainLayers(nn.Module):
    """Classifier of features, or of embedded tokens, whose skip connection bypasses the second slot."""

    def __init__(self, width: int, vocabulary: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Identity() if vocabulary is None else nn.Embedding(vocabulary, INPUTS)
        self.first, self.second = _layer(INPUTS, width), _layer(width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.embed(x))
        return self.head(h + self.second(h))


# --- hosts by name ----------------------------------------------------------------------------

Kind = Literal[
    "images", "images_batch", "plain_images", "tokens", "plain_tokens", "features", "plain_features"
]


class HostKind(NamedTuple):
    """Kind of host: its topology, and a constructor that takes the width of the slots."""

    topology: Topology
    build: Callable[[int], nn.Module]

    def sites(self, host: nn.Module) -> Sequence[Site] | None:
        """Return the sites of a plain module, or None for a host that defines its own sites."""
        if isinstance(host, Host):
            return None
        return find_sites(host, ["first", "second"], self.sample())

    def sample(self) -> Tensor:
        """Return an input batch of two samples for this kind of host."""
        if self.topology == "tokens":
            return torch.arange(2 * TOKENS).view(2, TOKENS) % VOCABULARY
        shape = (2, INPUTS) if self.topology == "features" else (2, *INPUT_SHAPE)
        return torch.linspace(-1.0, 1.0, torch.Size(shape).numel()).view(shape)


def _cnn(width: int) -> Host:
    host = CNNHost((width, width), kernel=3, input_shape=INPUT_SHAPE, classes=CLASSES)
    for segment in host.segments[:-1]:
        assert isinstance(segment, nn.Sequential)
        segment.append(nn.Dropout(DROPOUT))
    return host


def _transformer(width: int) -> Host:
    return TransformerHost(
        vocabulary=VOCABULARY, context=TOKENS, width=width, layers=2, heads=1, dropout=DROPOUT
    )


HOSTS: dict[Kind, HostKind] = {
    "images": HostKind("feature_map", _cnn),
    "images_batch": HostKind("feature_map", BatchHost),
    "plain_images": HostKind("feature_map", PlainImages),
    "tokens": HostKind("tokens", _transformer),
    "plain_tokens": HostKind("tokens", lambda width: PlainLayers(width, VOCABULARY)),
    "features": HostKind("features", FeatureHost),
    "plain_features": HostKind("features", PlainLayers),
}
assert tuple(HOSTS) == get_args(Kind)
