"""The hosts of the contract matrix, for feature maps, tokens and features.

Every one has dropout on both sides of its first slot.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

from torch import nn

from esper.kasmina import CNNHost, Host
from esper.kasmina.blueprints import Topology
from esper.kasmina.hosts import TransformerHost
from esper.leyline import SlotConfig

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
    """A host of a user's own, with batch statistics and activations in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.topology: Topology = "feature_map"
        self.slot_config = SlotConfig.of_count(2)
        self.feature_shapes = ((width, 4, 4), (width, 2, 2))
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))
        body = nn.Sequential(nn.MaxPool2d(2), _stage(width, width))
        self.segments = nn.ModuleList([_stage(INPUT_SHAPE[0], width), body, head])


# --- features ---------------------------------------------------------------------------------


def _layers(width: int) -> list[nn.Module]:
    first, second = (
        nn.Sequential(nn.Linear(size, width), nn.Tanh(), nn.Dropout(DROPOUT)) for size in (INPUTS, width)
    )
    return [first, second, nn.Linear(width, CLASSES)]


class FeatureHost(Host):
    """Three layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.topology: Topology = "features"
        self.slot_config = SlotConfig.of_count(2)
        self.feature_shapes = ((width,), (width,))
        self.segments = nn.ModuleList(_layers(width))


# --- by name ----------------------------------------------------------------------------------

Kind = Literal["images", "images_batch", "tokens", "features"]


class HostKind(NamedTuple):
    topology: Topology
    build: Callable[[int], Host]


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


HOSTS: dict[Kind, HostKind] = {
    "images": HostKind("feature_map", _cnn),
    "images_batch": HostKind("feature_map", BatchHost),
    "tokens": HostKind("tokens", _transformer),
    "features": HostKind("features", FeatureHost),
}
assert tuple(HOSTS) == get_args(Kind)
