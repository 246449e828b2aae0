"""Search for insertions: a trial finds how a copy of a block is inserted and what counts the blocks."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.dry_run import Call, dry_forward
from esper.kasmina.edits import Argument, BlockContainer, Count, Insertion, is_count, numbers_layers
from esper.leyline.errors import HostError


def is_element(net: nn.Module, path: str) -> bool:
    """Return whether the submodule at ``path`` is an element of a ``ModuleList`` or ``Sequential``."""
    container, _, name = path.rpartition(".")
    return isinstance(net.get_submodule(container), nn.ModuleList | nn.Sequential) and name.isdecimal()


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
    container = path.rpartition(".")[0]
    block, blocks = net.get_submodule(path), net.get_submodule(container)
    if not is_element(net, path):
        raise HostError(f"'{path}' is not an element of a ModuleList or Sequential of the network")
    assert isinstance(blocks, nn.ModuleList | nn.Sequential)
    if not any(True for _ in block.children()):
        raise HostError(f"'{path}' is a single layer and not a block of layers")
    _check_unshared(net, path)
    argument = _argument_of(found, features(found.output))
    wanted = dry_forward(net, sample)[1]
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
    if _rebuildable(net, container) is None:
        yield (*certain, *(count for count in in_near if count.entry is None))
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
    named = [(name, value) for name, value in vars(owner).items() if numbers_layers(name)]
    found = [
        Count(path, name, is_in_config)
        for name, value in named
        if is_count(value) and value == blocks and "size" not in name
    ]
    if is_in_config:
        found += [
            Count(path, name, is_in_config, entry)
            for name, values in named
            if isinstance(values, list | tuple) and all(map(is_count, values))
            for entry, value in enumerate(values)
            if value == blocks
        ]
    return found


def _try(net: nn.Module, path: str, insertion: Insertion, wanted: Any, sample: Any) -> None:
    """Insert a copy that passes its input on and run the network; raise HostError if the copy does not run
    exactly once or the output differs from ``wanted``. The network is unchanged afterwards.
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
    handle = twin.register_forward_hook(_pass_on(insertion.features), prepend=True, with_kwargs=True)
    try:
        calls, found = _run_with_copy(net, path, sample)
        times = sum(each.path == where for each in calls)
        if times != 1:
            raise HostError(
                f"a copy of '{path}' in '{insertion.container}' runs {times} times in one forward pass: the"
                " network selects its blocks by number, or counts them elsewhere"
            )
        if not _are_equal(wanted, found):
            raise HostError(
                f"a copy of '{path}' that changes nothing changes the output: the forward pass of the network"
                " depends on the number of blocks"
            )
        _check_rebuilt(net, insertion.container)
    finally:
        handle.remove()
        container.remove(twin)


def _run_with_copy(net: nn.Module, path: str, sample: Any) -> tuple[list[Call], Any]:
    try:
        return dry_forward(net, sample)
    except HostError as error:
        raise HostError(
            f"the forward pass fails with a copy of '{path}' behind it, so it needs a certain number or order"
            f" of blocks: {error.__cause__}"
        ) from None


def _are_equal(wanted: Any, found: Any) -> bool:
    """Return whether all tensors in two outputs of a network are bit-equal; where ``found`` has one entry
    more in a tuple or list, such as the hidden states of all blocks, one of them may be left out.
    """
    if isinstance(wanted, Tensor):
        return isinstance(found, Tensor) and torch.equal(wanted.nan_to_num(), found.nan_to_num())
    if isinstance(wanted, Mapping):
        same = isinstance(found, Mapping) and wanted.keys() == found.keys()
        return same and all(_are_equal(value, found[key]) for key, value in wanted.items())
    if isinstance(wanted, tuple | list) and isinstance(found, tuple | list):
        choices = [found]
        if len(found) == len(wanted) + 1:
            choices = [[*found[:out], *found[out + 1 :]] for out in range(len(found))]
        return any(len(wanted) == len(each) and all(map(_are_equal, wanted, each)) for each in choices)
    if dataclasses.is_dataclass(wanted):
        return _are_equal(vars(wanted), vars(found))
    return True


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
    path = _rebuildable(net, container)
    if path is None:
        return
    owner = net.get_submodule(path)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        rebuilt = type(owner)(copy.deepcopy(owner.config))
    inside = container.removeprefix(path).removeprefix(".")
    ours, theirs = _described(owner, inside), _described(rebuilt, inside)
    for one, other in zip_longest(ours, theirs):
        if one != other:
            name = (one or other)[0]
            raise HostError(
                f"{type(owner).__name__} with one more block differs from the {type(owner).__name__} that its"
                f" configuration describes, in '{name}'; from_pretrained could not read it"
            )


def _rebuildable(net: nn.Module, container: str) -> str | None:
    """Return the path of the outermost module around a container that can be built from its
    configuration."""
    parts = container.split(".")
    owners = (".".join(parts[:end]) for end in range(len(parts)))
    return next((p for p in owners if hasattr(type(net.get_submodule(p)), "from_pretrained")), None)


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
