"""Depth: insertion of a copied block into the container that holds it.

A block is a child of a ``ModuleList`` or a ``Sequential``. A copy of it is inserted behind it, so that the
network's own forward pass runs the copy with whatever it passes to its blocks: masks, position embeddings,
caches. Layer numbers, counts of layers and per-layer lists of a configuration are changed with the container,
so that ``save_pretrained`` and ``from_pretrained`` of transformers handle the grown network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from esper.kasmina.transaction import numbers_layers

LAYER_NUMBERS: Final = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx")
"""Attributes in which modules of a block store the position of the block."""


class Argument(NamedTuple):
    """Argument of a block that holds its input features."""

    key: int | str
    """Position of the argument, or its name if the network passes it by name."""

    def value(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the argument from positional and keyword arguments of a call."""
        return kwargs[self.key] if isinstance(self.key, str) else args[self.key]

    def replaced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], features: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with other input features."""
        if isinstance(self.key, str):
            return args, kwargs | {self.key: features}
        return (*args[: self.key], features, *args[self.key + 1 :]), kwargs


class Count(NamedTuple):
    """Attribute that counts the blocks of a container."""

    path: str
    """Path of the module that has the attribute, or whose ``config`` has it."""
    name: str
    is_in_config: bool
    entry: int | None = None
    """Index of the count in a list, such as ``depths``; None if the attribute is the count."""

    def owner(self, net: nn.Module) -> Any:
        """Return the object with the attribute: a module of ``net``, or the configuration of this module."""
        module = net.get_submodule(self.path)
        return module.config if self.is_in_config else module


class Insertion(NamedTuple):
    """Plain values that state where and how a copy of a block is inserted."""

    container: str
    """Path of the ``ModuleList`` or ``Sequential`` with the block."""
    features: Argument
    counts: tuple[Count, ...]

    def plain(self) -> list[Any]:
        """Return the insertion as lists, for files."""
        return [self.container, list(self.features), [list(count) for count in self.counts]]

    @classmethod
    def of(cls, plain: list[Any]) -> Insertion:
        """Return the insertion from the lists that ``plain`` returned."""
        container, features, counts = plain
        return cls(container, Argument(*features), tuple(Count(*count) for count in counts))


class BlockContainer:
    """Container of blocks, with the configurations and attributes that count its blocks.

    Args:
        net: Network with the container.
        insertion: Path of the container, and attributes that count its blocks.
    """

    def __init__(self, net: nn.Module, insertion: Insertion) -> None:
        found = net.get_submodule(insertion.container)
        assert isinstance(found, nn.ModuleList | nn.Sequential)
        self.blocks = found
        self.features = insertion.features
        self._counts = [(count.owner(net), count.name, count.entry) for count in insertion.counts]
        configs = [count.owner(net) for count in insertion.counts if count.is_in_config]
        self._configs = list({id(config): config for config in configs}.values())

    def position(self, block: nn.Module) -> int:
        """Return the index of the element of the container that is or contains ``block``."""
        return next(i for i, other in enumerate(self.blocks) if any(m is block for m in other.modules()))

    def insert(self, before: nn.Module, block: nn.Module) -> None:
        """Insert ``block`` behind the block ``before`` and count it."""
        position, numbers = self.position(before) + 1, _layer_numbers(self.blocks)
        per_block, positions = self._lists()
        self._count(1)
        for entries in per_block:
            entries.insert(position, entries[position - 1])
        for entries in positions:
            new = [position] if position - 1 in entries else []
            entries[:] = sorted([each + (each >= position) for each in entries] + new)
        self.blocks.insert(position, block)
        self._renumber(numbers)

    def remove(self, block: nn.Module) -> None:
        """Remove ``block`` from the container and from all counts."""
        position, numbers = self.position(block), _layer_numbers(self.blocks)
        per_block, positions = self._lists()
        for entries in per_block:
            del entries[position]
        for entries in positions:
            entries[:] = [each - (each > position) for each in entries if each != position]
        self._count(-1)
        del self.blocks[position]
        self._renumber(numbers)

    def _count(self, change: int) -> None:
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in self._counts]
        changed = 0
        try:
            for owner, name, entry in self._counts:
                setattr(owner, name, _changed(getattr(owner, name), entry, change))
                changed += 1
        except BaseException:  # The attribute of a frozen configuration cannot be set.
            for owner, name, value in reversed(before[:changed]):
                setattr(owner, name, value)
            raise

    def _lists(self) -> tuple[list[list[Any]], list[list[Any]]]:
        """Return the lists of the configurations that have one entry per block, and those that contain
        positions of blocks in ascending order.
        """
        counts = {name for _, name, _ in self._counts}
        lists = [
            value
            for config in self._configs
            for name, value in vars(config).items()
            if isinstance(value, list) and numbers_layers(name) and name not in counts
        ]
        present = range(len(self.blocks))
        positions = [each for each in lists if is_ascending(each, present)]
        found = [each for each in lists if len(each) == len(present) and not is_ascending(each, present)]
        return found, positions

    def _renumber(self, first: Mapping[str, int]) -> None:
        """Set the layer numbers in all blocks; ``first`` has the numbers of the first block."""
        for position, block in enumerate(self.blocks):
            for module in block.modules():
                for name in first:
                    if is_count(vars(module).get(name)):
                        setattr(module, name, first[name] + position)


def _layer_numbers(blocks: nn.ModuleList | nn.Sequential) -> dict[str, int]:
    """Return the layer numbers of the first block by attribute, as they follow from all blocks: the first
    block may lack a module that other blocks have.
    """
    return {
        name: value - position
        for position, block in enumerate(blocks)
        for module in block.modules()
        for name, value in vars(module).items()
        if name in LAYER_NUMBERS and is_count(value)
    }


def _changed(value: Any, entry: int | None, change: int) -> Any:
    """Return a count after a change, or the list with the count."""
    if entry is None:
        return value + change
    return type(value)(each + change * (index == entry) for index, each in enumerate(value))


def is_ascending(values: Sequence[Any], allowed: range) -> bool:
    """Return whether ``values`` are different numbers of a range in ascending order."""
    return all(is_count(each) and each in allowed for each in values) and sorted(set(values)) == values


def is_count(value: Any) -> bool:
    """Return whether a value is an integer, other than True and False."""
    return isinstance(value, int) and not isinstance(value, bool)
