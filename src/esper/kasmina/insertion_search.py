"""Search for insertions: a trial finds how a copy of a block is inserted and what counts the blocks."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.dry_run import Call, dry_forward
from esper.kasmina.edits import Argument, BlockContainer, Count, Insertion, is_count
from esper.kasmina.transaction import numbers_layers
from esper.leyline.errors import HostError


def is_element(net: nn.Module, path: str) -> bool:
    """Return whether the submodule at ``path`` is an element of a ``ModuleList`` or ``Sequential``."""
    container, _, name = path.rpartition(".")
    return isinstance(net.get_submodule(container), nn.ModuleList | nn.Sequential) and name.isdecimal()


def find_insertion(
    net: nn.Module, path: str, found: Sequence[Call], features: Callable[[Any], Tensor], sample: Any
) -> Insertion:
    """Return how a copy of the block at ``path`` is inserted behind it, after a trial of the insertion.

    In the trial, a copy that passes its input on must run as often as the block and leave all outputs of the
    network bit-equal. If the network can be built from its configuration, a network that is built from the
    changed configuration must have the same modules and parameters.

    Args:
        net: Network with the block; unchanged afterwards.
        path: Path of the block.
        found: Recorded calls of the block.
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
    argument = _argument_of(found[0], features(found[0].output))
    before = dry_forward(net, sample)[1], _differences(net, container)
    reasons: list[_InsertionError] = []
    for counts in _choices(net, container, len(blocks)):
        insertion = Insertion(container, argument, counts)
        try:
            _try(net, path, insertion, before, sample, len(found))
        except _InsertionError as error:
            reasons.append(error)
            continue
        return insertion
    raise HostError(str(min(reasons, key=lambda each: each.differences)))


class _InsertionError(HostError):
    """Reason against an insertion.

    Args:
        reason: Sentence for users.
        differences: Number of differences to a network that is built from the configuration.
    """

    def __init__(self, reason: str, differences: float = math.inf) -> None:
        super().__init__(reason)
        self.differences = differences


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
    if rebuildable(net, container) is None:
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


@contextmanager
def _inserted(net: nn.Module, path: str, insertion: Insertion) -> Iterator[str]:
    """Insert a copy that passes its input on, and return its path; the copy is removed on exit."""
    block = net.get_submodule(path)
    container, twin = BlockContainer(net, insertion), copy.deepcopy(block)
    where = f"{insertion.container}.{container.position(block) + 1}".lstrip(".")
    try:
        container.insert(block, twin)
    except (AttributeError, TypeError) as error:  # The configuration is frozen.
        raise _InsertionError(
            f"the count of blocks in '{insertion.container}' cannot be changed: {error}"
        ) from None
    handle = twin.register_forward_hook(_pass_on(insertion.features), prepend=True, with_kwargs=True)
    try:
        yield where
    finally:
        handle.remove()
        container.remove(twin)


def _try(
    net: nn.Module,
    path: str,
    insertion: Insertion,
    before: tuple[Any, Mapping[str, str]],
    sample: Any,
    calls_of_block: int,
) -> None:
    """Run the network with a copy that passes its input on, and build a network from its configuration; the
    network is unchanged afterwards.

    Args:
        net: Network with the block.
        path: Path of the block.
        insertion: Insertion to try.
        before: Output and differences of the network without the copy.
        sample: Input that the network is called with.
        calls_of_block: Number of calls of the block in a forward pass.

    Raises:
        _InsertionError: The copy does not run as often as the block, the output differs, or there are new
            differences to a network that is built from the configuration.
    """
    wanted, known = before
    with _inserted(net, path, insertion) as where:
        calls, found = _run_with_copy(net, path, sample)
        differences = _differences(net, insertion.container)
    times = sum(each.path == where for each in calls)
    if times != calls_of_block:
        raise _InsertionError(
            f"a copy of '{path}' in '{insertion.container}' runs {times} times in one forward pass: the"
            " network selects its blocks by number, or counts them elsewhere"
        )
    if not _children_run(calls, path) <= _children_run(calls, where):
        raise _InsertionError(
            f"a copy of '{path}' does not run its own layers: the forward of the block was replaced by a"
            " function that keeps the block"
        )
    if not are_equal(wanted, found):
        raise _InsertionError(
            f"a copy of '{path}' that changes nothing changes the output: the forward pass of the network"
            " depends on the number of blocks"
        )
    new = [name for kind, name in differences.items() if kind not in known]
    if new:
        name = type(net.get_submodule(rebuildable(net, insertion.container) or "")).__name__
        raise _InsertionError(
            f"{name} with one more block differs from the {name} that its configuration describes, in"
            f" '{new[0]}'; from_pretrained could not read it",
            len(new),
        )


def _children_run(calls: Sequence[Call], path: str) -> set[str]:
    """Return the names of the children that ran in the submodule at ``path``."""
    inside = f"{path}."
    return {each.path[len(inside) :].split(".")[0] for each in calls if each.path.startswith(inside)}


def _run_with_copy(net: nn.Module, path: str, sample: Any) -> tuple[list[Call], Any]:
    try:
        return dry_forward(net, sample)
    except HostError as error:
        raise _InsertionError(
            f"the forward pass fails with a copy of '{path}' behind it, so it needs a certain number or order"
            f" of blocks: {str(error.__cause__ or error).splitlines()[0]}"
        ) from None


def are_equal(wanted: Any, found: Any) -> bool:
    """Return whether all tensors in two outputs of a network are bit-equal; where ``found`` has one entry
    more in a tuple or list, such as the hidden states of all blocks, one of them may be left out.
    """
    if isinstance(wanted, Tensor):
        return isinstance(found, Tensor) and torch.equal(wanted.nan_to_num(), found.nan_to_num())
    if isinstance(wanted, Mapping):
        same = isinstance(found, Mapping) and wanted.keys() == found.keys()
        return same and all(are_equal(value, found[key]) for key, value in wanted.items())
    if isinstance(wanted, tuple | list) and isinstance(found, tuple | list):
        choices = [found]
        if len(found) == len(wanted) + 1:
            choices = [[*found[:out], *found[out + 1 :]] for out in range(len(found))]
        return any(len(wanted) == len(each) and all(map(are_equal, wanted, each)) for each in choices)
    if dataclasses.is_dataclass(wanted):
        return are_equal(vars(wanted), vars(found))
    return True


def _pass_on(features: Argument) -> Callable[..., Any]:
    def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        h = features.value(args, kwargs)
        if isinstance(output, Tensor):
            return h
        return (h, *output[1:]) if isinstance(output, tuple) and not hasattr(output, "_fields") else output

    return hook


def rebuildable(net: nn.Module, container: str) -> str | None:
    """Return the path of the outermost module around a container that is built from a configuration alone,
    as models of transformers are; None if there is no such module."""
    parts = container.split(".")
    for end in range(len(parts)):
        module = net.get_submodule(".".join(parts[:end]))
        kind = getattr(type(module), "config_class", None)
        if kind and isinstance(vars(module).get("config"), kind) and hasattr(module, "from_pretrained"):
            needed = [p for p in inspect.signature(type(module)).parameters.values() if p.default is p.empty]
            names = [p.name for p in needed if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
            return ".".join(parts[:end]) if names == ["config"] else None
    return None


def rebuilt(owner: nn.Module) -> nn.Module:
    """Return a module without weights that is built from the present configuration of ``owner``."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        built: nn.Module = type(owner)(copy.deepcopy(owner.config))
    return built


def _differences(net: nn.Module, container: str) -> dict[str, str]:
    """Return the names of tensors of a network, and of attributes of modules in ``container``, that a network
    built from the same configuration does not have or has otherwise.

    The keys are the names without the number of the block. A network without configuration has no
    differences.
    """
    path = rebuildable(net, container)
    if path is None:
        return {}
    owner = net.get_submodule(path)
    try:
        built = rebuilt(owner)
    except Exception as error:
        raise _InsertionError(
            f"no {type(owner).__name__} can be built from the configuration that counts the blocks:"
            f" {(str(error) or type(error).__name__).splitlines()[0]}"
        ) from error
    inside = container.removeprefix(path).removeprefix(".")
    ours, theirs = _described(owner, inside), _described(built, inside)
    found: dict[str, str] = {}
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name):
            found.setdefault(re.sub(rf"^{re.escape(inside)}\.\d+\.", "", name), name)
    return found


def _described(net: nn.Module, container: str) -> dict[str, Any]:
    """Return shapes of all tensors, and plain attributes of all modules in ``container``, by name."""
    blocks = net.get_submodule(container)
    attributes = {
        ".".join(filter(None, (container, name, key))): value
        for name, module in blocks.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, int | float | str) and key != "training" and not key.startswith("_")
    }
    return {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()} | attributes
