"""Width: new hidden units between two layers of a network.

A pair is one first layer, or two in a gated MLP, and the second layer that consumes their outputs, the hidden
units. New units are parameters of their own while they are on trial: hooks append them to the outputs of the
first layers, so that the forward pass of the network applies its activation function and its gating to them,
and add their contribution to the output of the second layer. ``enlargement.py`` makes the units permanent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import BlueprintSpec
from esper.kasmina.blueprints.widen import NewUnits
from esper.kasmina.edits import BlockContainer
from esper.kasmina.graft import Graft, Handles

if TYPE_CHECKING:
    from esper.kasmina.sites import Site

Layer = nn.Linear | nn.Conv2d
Norm = nn.BatchNorm1d | nn.BatchNorm2d


class Setting(NamedTuple):
    """Attribute of a configuration that states the number of hidden units of all blocks in a container."""

    container: str
    """Path of the ``ModuleList`` with the blocks."""
    owner: str
    """Path of the module that has the configuration."""
    name: str


class Pair(NamedTuple):
    """Plain values that state between which layers hidden units can be added."""

    first: tuple[str, ...]
    """Paths of the first layers."""
    norm: str | None
    """Path of the batch normalisation of the hidden units."""
    second: str
    between: tuple[str, ...]
    """Paths of the modules that run between the first layers and the second layer."""
    shape: tuple[int, ...]
    """Shape of the input of the first layers, with the batch axis."""
    hidden_shape: tuple[int, ...]
    """Shape of the input of the second layer, with the batch axis."""
    setting: Setting | None = None

    @property
    def widened(self) -> set[str]:
        """Paths of all modules whose output contains the hidden units."""
        return {*self.first, *self.between}

    @property
    def unnormed(self) -> set[str]:
        """Paths of the modules between the layers, without the batch normalisation of the units."""
        return {*self.between} - {self.norm}

    def inside(self, container: str) -> Pair:
        """Return the pair with paths that start at a block of ``container``."""
        block = self.second[len(container) + 1 :].partition(".")[0]
        start = len(f"{container}.{block}.")
        norm = None if self.norm is None else self.norm[start:]
        first = tuple(path[start:] for path in self.first)
        return self._replace(first=first, norm=norm, second=self.second[start:], setting=None)

    def plain(self) -> list[Any]:
        """Return the pair as lists, for files."""
        values = [list(value) if isinstance(value, tuple) else value for value in self[:-1]]
        return [*values, self.setting and list(self.setting)]

    @classmethod
    def of(cls, plain: list[Any]) -> Pair:
        """Return the pair from the lists that ``plain`` returned."""
        first, norm, second, between, shape, hidden_shape, setting = plain
        shapes = tuple(shape), tuple(hidden_shape)
        return cls(tuple(first), norm, second, tuple(between), *shapes, setting and Setting(*setting))


@dataclass(frozen=True, slots=True)
class SharedSize:
    """Blocks that must have the same number of hidden units, because one attribute of a configuration states
    the number for all of them."""

    blocks: nn.ModuleList | nn.Sequential
    names: Pair
    """Pair of a block; its paths start at the block."""
    config: Any
    attribute: str
    before: int
    """Number of hidden units before the network grew."""


class PairLayers(NamedTuple):
    """Layers of a pair; unlike their paths, they stay valid when blocks are inserted into the network."""

    first: tuple[Layer, ...]
    norm: Norm | None
    second: Layer
    shared: SharedSize | None = None

    @classmethod
    def of(cls, net: nn.Module, pair: Pair) -> PairLayers:
        """Return the layers of ``pair`` in a network without inserted blocks."""
        first: Any = tuple(map(net.get_submodule, pair.first))
        norm: Any = None if pair.norm is None else net.get_submodule(pair.norm)
        second: Any = net.get_submodule(pair.second)
        if pair.setting is None:
            return cls(first, norm, second)
        blocks, owner = net.get_submodule(pair.setting.container), net.get_submodule(pair.setting.owner)
        assert isinstance(blocks, nn.ModuleList | nn.Sequential)
        inside = pair.inside(pair.setting.container)
        size = SharedSize(blocks, inside, owner.config, pair.setting.name, len(first[0].weight))
        return cls(first, norm, second, size)

    @property
    def hidden(self) -> int:
        """Number of hidden units."""
        return len(self.first[0].weight)

    def modules(self) -> list[Layer | Norm]:
        """Return all layers of the pair."""
        return [*self.first, *([] if self.norm is None else [self.norm]), self.second]


class WidthGraft(Graft):
    """New hidden units between the layers of a pair, attached by hooks of these layers.

    Args:
        site: Position of the slot in the network.
        spec: Blueprint of the seed.
        style: Index of the blend style.
        layers: Layers of the pair; the graft does not keep them.

    Raises:
        IncompatibleSeedError: The style does not blend by addition.
    """

    seed: NewUnits

    def __init__(self, site: Site, spec: BlueprintSpec, style: int, layers: PairLayers) -> None:
        super().__init__(site, spec.name, style, is_stored=True)
        self.check_adds("new hidden units", style)
        self.seed = spec.build(layers)  # type: ignore[assignment]  # a blueprint builds any module
        self.hidden = layers.hidden
        self._axis = 1 if isinstance(layers.second, nn.Conv2d) else -1
        self._units: Tensor | None = None
        """New hidden units between the two hooks of a layer that must not receive them."""
        self._is_off = False
        """Whether alpha is 0."""
        self.to(layers.first[0].weight)

    @property
    def count(self) -> int:
        """Number of new hidden units."""
        return self.seed.outer.get_parameter("weight").shape[1]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_units": None}

    def attach(
        self, module: nn.Module, container: BlockContainer | None, layers: PairLayers | None
    ) -> Handles:
        assert layers is not None
        self.train(module.training)
        handles = [
            layer.register_forward_hook(hook)
            for layer, hook in zip(layers.first, (self.on_first, self.on_gated), strict=False)
        ]
        if layers.norm is not None:
            handles.append(layers.norm.register_forward_pre_hook(self.on_norm_input))
            handles.append(layers.norm.register_forward_hook(self.on_norm))
        handles.append(layers.second.register_forward_pre_hook(self.on_second_input))
        # The contribution of the units is added before other seeds see the output of the second layer, as
        # in the network with permanent units.
        handles.append(layers.second.register_forward_hook(self.on_second, prepend=True))
        return Handles(tuple(handles))

    def set_alpha(self, alpha: float) -> None:
        super().set_alpha(alpha)
        self._is_off = alpha == 0.0

    def on_first(self, _layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        """Append the new units to the output of the first layer."""
        return self._appended(0, args, output)

    def on_gated(self, _layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        """Append the new units to the output of the other first layer of a gated MLP."""
        return self._appended(1, args, output)

    def _appended(self, number: int, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        part = self.participation
        if not part.active or (self._is_off and part.alpha is None):
            return None
        return torch.cat([output, self.seed.inner[number](args[0])], self._axis)

    def on_norm_input(self, _layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Remove the new units from the input of the batch normalisation."""
        return self._without_units(args, 1)

    def on_norm(self, _layer: nn.Module, _args: Any, output: Tensor) -> Tensor | None:
        """Append the new units, with a normalisation of their own, to the output of the normalisation."""
        units, self._units = self._units, None
        if units is None or self.seed.norm is None:
            return None
        return torch.cat([output, self.seed.norm(units)], 1)

    def on_second_input(self, _layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Remove the new units from the input of the second layer."""
        return self._without_units(args, self._axis)

    def on_second(self, _layer: nn.Module, _args: Any, output: Tensor) -> Tensor | None:
        """Add the contribution of the new units, weighted by alpha, to the output of the second layer."""
        units, self._units = self._units, None
        if units is None:
            return None
        alpha = self.alpha if self.participation.alpha is None else self.participation.alpha
        added: Tensor = self.seed.outer(units)
        return output + alpha.to(added.dtype) * added

    def _without_units(self, args: tuple[Tensor, ...], axis: int) -> tuple[Tensor, ...] | None:
        features, *others = args
        if features.shape[axis] == self.hidden:
            self._units = None
            return None
        old, self._units = features.split([self.hidden, features.shape[axis] - self.hidden], axis)
        # A copy has the memory layout of the network without new units, so the layer computes the same bits.
        return old.clone(), *others
