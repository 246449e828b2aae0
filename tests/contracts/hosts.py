"""The hosts of the contract matrix: in segments and wrapped, for feature maps, tokens and features.

Every one has dropout on both sides of its first slot.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from esper.kasmina import CNNHost, Host, SegmentedHost, WrappedHost
from esper.kasmina.blueprints import Topology
from esper.kasmina.hosts import TransformerHost
from esper.leyline import SlotConfig

CLASSES = 4
INPUT_SHAPE = (2, 4, 4)
VOCABULARY = 8
TOKENS = 5
INPUTS = 6
DROPOUT = 0.2

MakeNorm = Callable[[int], nn.Module]


def group_norm(width: int) -> nn.Module:
    return nn.GroupNorm(1, width)


# --- feature maps -----------------------------------------------------------------------------


def _stage(channels: int, width: int, norm: MakeNorm) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        norm(width),
        nn.ReLU(inplace=True),
        nn.Dropout(DROPOUT),
    )


class MeanHead(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


class PlainNet(nn.Module):
    """A module that knows nothing of slots."""

    def __init__(self, width: int, norm: MakeNorm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = _stage(INPUT_SHAPE[0], width, norm)
        self.pool = nn.MaxPool2d(2)
        self.body = _stage(width, width, norm)
        self.head = MeanHead(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.pool(self.stem(x))))


class ChainHost(SegmentedHost):
    """The same network in segments."""

    def __init__(self, width: int, norm: MakeNorm) -> None:
        super().__init__()
        self.topology: Topology = "feature_map"
        self.slot_config = SlotConfig.of_count(2)
        self.feature_shapes = ((width, 4, 4), (width, 2, 2))
        net = PlainNet(width, norm)
        self.segments = nn.ModuleList([net.stem, nn.Sequential(net.pool, net.body), net.head])


# --- features ---------------------------------------------------------------------------------


def _layers(width: int) -> list[nn.Module]:
    first, second = (
        nn.Sequential(nn.Linear(size, width), nn.Tanh(), nn.Dropout(DROPOUT)) for size in (INPUTS, width)
    )
    return [first, second, nn.Linear(width, CLASSES)]


class FeatureHost(SegmentedHost):
    """Three layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.topology: Topology = "features"
        self.slot_config = SlotConfig.of_count(2)
        self.feature_shapes = ((width,), (width,))
        self.segments = nn.ModuleList(_layers(width))


# --- by name ----------------------------------------------------------------------------------

Kind = Literal[
    "segmented",
    "segmented_batch",
    "segmented_tokens",
    "segmented_features",
    "wrapped",
    "wrapped_group",
    "wrapped_tokens",
    "wrapped_features",
]


class HostKind(NamedTuple):
    topology: Topology
    build: Callable[[int], Host]
    upstream: str
    """What the names of the host's parameters before the first slot begin with."""


def _cnn(width: int) -> Host:
    host = CNNHost((width, width), kernel=3, input_shape=INPUT_SHAPE, classes=CLASSES)
    for segment in host.segments[:-1]:
        assert isinstance(segment, nn.Sequential)
        segment.append(nn.Dropout(DROPOUT))
    return host


def _transformer(width: int) -> TransformerHost:
    return TransformerHost(
        vocabulary=VOCABULARY, context=TOKENS, width=width, layers=2, heads=1, dropout=DROPOUT
    )


def _wrapped_net(width: int, norm: MakeNorm) -> Host:
    return WrappedHost(PlainNet(width, norm), ["stem", "body"], torch.zeros(2, *INPUT_SHAPE))


def _wrapped_tokens(width: int) -> Host:
    plain = nn.Sequential(*_transformer(width).segments)
    return WrappedHost(plain, ["0", "1"], torch.zeros(2, TOKENS, dtype=torch.long), topology="tokens")


def _wrapped_features(width: int) -> Host:
    return WrappedHost(
        nn.Sequential(*_layers(width)), ["0", "1"], torch.zeros(2, INPUTS), topology="features"
    )


HOSTS: dict[Kind, HostKind] = {
    "segmented": HostKind("feature_map", _cnn, "segments.0."),
    "segmented_batch": HostKind("feature_map", lambda w: ChainHost(w, nn.BatchNorm2d), "segments.0."),
    "segmented_tokens": HostKind("tokens", _transformer, "segments.0."),
    "segmented_features": HostKind("features", FeatureHost, "segments.0."),
    "wrapped": HostKind("feature_map", lambda w: _wrapped_net(w, nn.BatchNorm2d), "module.stem."),
    "wrapped_group": HostKind("feature_map", lambda w: _wrapped_net(w, group_norm), "module.stem."),
    "wrapped_tokens": HostKind("tokens", _wrapped_tokens, "module.0."),
    "wrapped_features": HostKind("features", _wrapped_features, "module.0."),
}
assert tuple(HOSTS) == get_args(Kind)
