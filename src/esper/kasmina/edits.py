"""Depth: insertion of a copied block into the container that holds it.

A block is a child of a ``ModuleList`` or a ``Sequential``. A copy of it is inserted behind it, so that the
network's own forward pass runs the copy with whatever it passes to its blocks: masks, position embeddings,
caches. Layer numbers, counts of layers and per-layer lists of a configuration are changed with the container,
so that ``save_pretrained`` and ``from_pretrained`` of transformers handle the grown network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from esper.kasmina.dry_run import Call, dry_forward, tensors_in
from esper.leyline.errors import HostError

LAYER_NUMBERS: Final = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx")
"""Attributes in which modules of a block store the position of the block."""
_COUNTS: Final = ("layer", "block", "depth", "hidden_group")
"""Parts of the names of attributes that count the blocks of a container or have one entry per block."""
_WIDTHS: Final = ("intermediate", "ffn", "inner", "mlp", "d_ff", "feedforward")
"""Parts of the names of attributes that state the number of hidden units."""


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
        self._counts = [(count.owner(net), count.name) for count in insertion.counts]
        configs = [count.owner(net) for count in insertion.counts if count.is_in_config]
        self._configs = list({id(config): config for config in configs}.values())

    def position(self, block: nn.Module) -> int:
        """Return the index of ``block`` in the container."""
        return next(i for i, other in enumerate(self.blocks) if other is block)

    def insert(self, before: nn.Module, block: nn.Module) -> None:
        """Insert ``block`` behind the block ``before`` and count it."""
        position, numbers = self.position(before) + 1, _layer_numbers(self.blocks)
        per_layer = self._per_layer()
        self._count(1)
        for entries in per_layer:
            entries.insert(position, entries[position - 1])
        self.blocks.insert(position, block)
        self._renumber(numbers)

    def remove(self, block: nn.Module) -> None:
        """Remove ``block`` from the container and from all counts."""
        position, numbers = self.position(block), _layer_numbers(self.blocks)
        for entries in self._per_layer():
            del entries[position]
        self._count(-1)
        del self.blocks[position]
        self._renumber(numbers)

    def _count(self, change: int) -> None:
        before = [(owner, name, getattr(owner, name)) for owner, name in self._counts]
        changed = 0
        try:
            for owner, name, value in before:
                setattr(owner, name, value + change)
                changed += 1
        except BaseException:  # The attribute of a frozen configuration cannot be set.
            for owner, name, value in before[:changed]:
                setattr(owner, name, value)
            raise

    def _per_layer(self) -> list[list[Any]]:
        """Return the lists of the configurations that have one entry per block."""
        return [
            value
            for config in self._configs
            for name, value in vars(config).items()
            if isinstance(value, list) and len(value) == len(self.blocks) and numbers_layers(name)
        ]

    def _renumber(self, first: Mapping[str, int]) -> None:
        """Set the layer numbers in all blocks; ``first`` has the numbers of the first block."""
        for position, block in enumerate(self.blocks):
            for module in block.modules():
                for name in first.keys() & vars(module).keys():
                    setattr(module, name, first[name] + position)


def _layer_numbers(blocks: nn.ModuleList | nn.Sequential) -> dict[str, int]:
    """Return the layer numbers that modules of the first block store, by attribute."""
    return {
        name: value
        for module in blocks[0].modules()
        for name, value in vars(module).items()
        if name in LAYER_NUMBERS and _is_count(value)
    }


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def numbers_layers(name: str) -> bool:
    """Return whether an attribute of this name may be the number of a block or the number of all blocks."""
    return any(part in name for part in _COUNTS)


def names_width(name: str) -> bool:
    """Return whether an attribute of this name may be the number of hidden units of an MLP."""
    return any(part in name for part in _WIDTHS)


# --- search for insertions ----------------------------------------------------------------------------------


def find_insertion(
    net: nn.Module, path: str, found: Call, features: Callable[[Any], Tensor], sample: Any
) -> Insertion:
    """Return how a copy of the block at ``path`` is inserted behind it, after a trial of the insertion.

    In the trial, a copy that passes its input on must run once and leave all outputs of the network
    bit-equal. If the network can be built from its configuration, a network that is built from the changed
    configuration must have the same modules and parameters.

    Args:
        net: Network with the block; unchanged afterwards.
        path: Path of the block.
        found: Recorded call of the block.
        features: Function that returns the features in the block's return value.
        sample: Input that the network is called with.

    Raises:
        HostError: A copy cannot be inserted; the message states the reason.
    """
    container, _, name = path.rpartition(".")
    block, blocks = net.get_submodule(path), net.get_submodule(container)
    if not isinstance(blocks, nn.ModuleList | nn.Sequential) or not name.isdecimal():
        raise HostError(f"'{path}' is not an element of a ModuleList or Sequential of the network")
    if not any(True for _ in block.children()):
        raise HostError(f"'{path}' is a single layer and not a block of layers")
    _check_unshared(net, path)
    argument = _argument_of(found, features(found.output))
    wanted = tensors_in(dry_forward(net, sample)[1])
    reason = ""
    for counts in _choices(net, container, len(blocks)):
        insertion = Insertion(container, argument, counts)
        try:
            _try(net, path, insertion, wanted, sample)
        except HostError as error:
            reason = reason or str(error)
            continue
        return insertion
    raise HostError(reason)


def _check_unshared(net: nn.Module, path: str) -> None:
    """Raise HostError if the block shares a parameter with another module, which a copy would not share."""
    inside = {id(p) for p in net.get_submodule(path).parameters()}
    names = [name for name, p in net.named_parameters(remove_duplicate=False) if id(p) in inside]
    shared = [name for name in names if not name.startswith(f"{path}.")]
    if shared:
        raise HostError(f"'{path}' shares the parameter {shared[0]} with another module")


def _argument_of(found: Call, output: Tensor) -> Argument:
    """Return the first argument with the shape of the block's output features."""
    given: list[tuple[int | str, Any]] = [*enumerate(found.args), *found.kwargs.items()]
    for key, value in given:
        if isinstance(value, Tensor) and value.shape == output.shape and value.dtype == output.dtype:
            return Argument(key)
    raise HostError(f"'{found.path}' returns features of another shape than it takes, {tuple(output.shape)}")


def _choices(net: nn.Module, container: str, blocks: int) -> Iterator[tuple[Count, ...]]:
    """Return the sets of attributes that may count the blocks of the container, the likeliest first.

    The nearest configuration and the module with the container certainly count it. The configuration of the
    outermost module may have several counts of the same value, such as those of encoder and decoder.
    """
    parts = container.split(".")
    above = [".".join(parts[:end]) for end in range(len(parts) - 1, -1, -1)]
    certain = _counts_in(net, above[0], blocks, is_in_config=False)
    configs = {path: vars(net.get_submodule(path)).get("config") for path in above}
    with_config = [path for path, config in configs.items() if hasattr(config, "__dict__")]
    if not with_config:
        yield tuple(certain)
        return
    near, top = with_config[0], with_config[-1]
    main = _main_count(net.get_submodule(near).config)
    in_near = _counts_in(net, near, blocks, is_in_config=True)
    certain += [count for count in in_near if count.name == main]
    is_same = net.get_submodule(near).config is net.get_submodule(top).config
    others = [count for count in _counts_in(net, top, blocks, is_in_config=True) if count not in certain]
    if is_same:
        certain_names = {count.name for count in certain if count.is_in_config}
        others = [count for count in others if count.name not in certain_names]
    yield tuple(certain)
    for other in others:
        yield (*certain, other)
        if is_same:
            yield (*(count for count in certain if not count.is_in_config), other)
    if len(others) > 1:
        yield (*certain, *others)


def _main_count(config: Any) -> str:
    mapped: str = getattr(config, "attribute_map", {}).get("num_hidden_layers", "num_hidden_layers")
    return mapped


def _counts_in(net: nn.Module, path: str, blocks: int, *, is_in_config: bool) -> list[Count]:
    owner = Count(path, "", is_in_config).owner(net)
    return [
        Count(path, name, is_in_config)
        for name, value in vars(owner).items()
        if _is_count(value) and value == blocks and numbers_layers(name)
    ]


def _try(net: nn.Module, path: str, insertion: Insertion, wanted: list[Tensor], sample: Any) -> None:
    """Insert a copy that passes its input on and run the network; raise HostError if the copy does not run
    exactly once or an output differs. The network is unchanged afterwards.
    """
    block = net.get_submodule(path)
    container, twin = BlockContainer(net, insertion), copy.deepcopy(block)
    where = f"{insertion.container}.{container.position(block) + 1}".lstrip(".")
    try:
        container.insert(block, twin)
    except (AttributeError, TypeError) as error:  # The configuration is frozen.
        raise HostError(
            f"the count of blocks in '{insertion.container}' cannot be changed: {error}"
        ) from None
    handle = twin.register_forward_hook(_pass_on(insertion.features), with_kwargs=True)
    try:
        calls, result = dry_forward(net, sample)
        found = tensors_in(result)
        times = sum(each.path == where for each in calls)
        if times != 1:
            raise HostError(
                f"a copy of '{path}' in '{insertion.container}' runs {times} times in one forward pass: the"
                " network selects its blocks by number, or counts them elsewhere"
            )
        if len(found) != len(wanted) or not all(map(equal_outputs, found, wanted)):
            raise HostError(
                f"a copy of '{path}' that changes nothing changes the output: the forward pass of the network"
                " depends on the number of blocks"
            )
        _check_rebuilt(net, insertion.container)
    finally:
        handle.remove()
        container.remove(twin)


def equal_outputs(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are bit-equal; NaN is equal to NaN."""
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _pass_on(features: Argument) -> Callable[..., Any]:
    def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        h = features.value(args, kwargs)
        if isinstance(output, Tensor):
            return h
        return (h, *output[1:]) if isinstance(output, tuple) and not hasattr(output, "_fields") else output

    return hook


def _check_rebuilt(net: nn.Module, container: str) -> None:
    """Raise HostError unless a network that is built from the present configuration has the parameters of
    ``net`` and the same blocks in ``container``; networks without ``from_pretrained`` are not checked.
    """
    path = pretrained_owner(net, container)
    if path is None:
        return
    owner = net.get_submodule(path)
    built = rebuilt(owner)
    inside = container.removeprefix(path).removeprefix(".")
    ours, theirs = _described(owner, inside), _described(built, inside)
    for one, other in zip_longest(ours, theirs):
        if one != other:
            name = (one or other)[0]
            raise HostError(
                f"{type(owner).__name__} with one more block differs from the {type(owner).__name__} that its"
                f" configuration describes, in '{name}'; from_pretrained could not read it"
            )


def pretrained_owner(net: nn.Module, path: str) -> str | None:
    """Return the path of the outermost module around ``path`` that has ``from_pretrained``."""
    parts = path.split(".")
    owners = (".".join(parts[:end]) for end in range(len(parts)))
    return next((p for p in owners if hasattr(type(net.get_submodule(p)), "from_pretrained")), None)


def rebuilt(owner: nn.Module) -> nn.Module:
    """Return a module without weights that is built from the present configuration of ``owner``."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        built: nn.Module = type(owner)(copy.deepcopy(owner.config))
    return built


def _described(net: nn.Module, container: str) -> list[tuple[str, Any]]:
    """Return names and shapes of all tensors, and plain attributes of all modules in ``container``."""
    tensors: list[tuple[str, Any]] = [(name, tuple(t.shape)) for name, t in net.state_dict().items()]
    blocks = net.get_submodule(container)
    attributes = [
        (".".join(filter(None, (container, name, key))), value)
        for name, module in blocks.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, int | float | str) and key != "training" and not key.startswith("_")
    ]
    return tensors + attributes
