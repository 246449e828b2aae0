"""Places in a user's network where a seed could go, found by one forward on a sample.

A site is a submodule that runs exactly once and hands on a tensor of features, alone or in a tuple, a dict
or a dataclass. A ``Sequential`` stands for its last child, whose output is its own, so no container is ever
changed.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor, fx, nn

from esper.kasmina.blueprints import Topology
from esper.kasmina.streams import TorchStream
from esper.leyline.errors import HostError, UnknownNameError
from esper.tolaria.flops import flop_counter

MOST_AUTO_SITES: Final = 8
"""Places that ``slots="auto"`` takes, spread over the depth of the network."""
GROWN: Final = "grown"
"""Name of the child that a finished submodule has."""
_TOPOLOGY_OF_RANK: Final[Mapping[int, Topology]] = {4: "feature_map", 3: "tokens", 2: "features"}

Holder = Literal["tensor", "tuple", "list", "namedtuple", "mapping", "dataclass"]
"""What a submodule returns its features in."""


class Output(NamedTuple):
    """Where the features are in what a submodule returns."""

    holder: Holder
    key: Any = None
    """Index or name of the tensor; nothing where the output is the tensor."""

    def features(self, output: Any) -> Any:
        """The tensor that is grown."""
        if self.holder == "tensor":
            return output
        return getattr(output, self.key) if self.holder in {"namedtuple", "dataclass"} else output[self.key]


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """One place for a seed."""

    name: str
    """As it is spoken of: ``layer2``."""
    path: str
    """Of the submodule that carries the slot: ``layer2.1``."""
    topology: Topology
    width: int
    shape: tuple[int, ...]
    """Of the features of the sample, the batch included, as a seed sees them."""
    output: Output
    swap: tuple[int, int] | None = None
    """Axes to exchange before a seed sees ``[tokens, batch, width]`` or ``[batch, width, tokens]``."""
    copyable: bool = False
    """The submodule is a block whose output has the shape of its one input: ``stack`` can repeat it."""


class Call(NamedTuple):
    """One call of a submodule in the dry forward."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


def call(net: nn.Module, sample: Any) -> Any:
    """``net`` on a sample: a tensor, a tuple of arguments, or a dict of named ones (else one argument)."""
    signature = inspect.signature(net.forward)
    if isinstance(sample, Mapping):
        try:
            signature.bind(**sample)
        except TypeError:
            return net(sample)
        return net(**sample)
    if not isinstance(sample, tuple | list):
        return net(sample)
    try:
        signature.bind(*sample)
    except TypeError as error:
        raise HostError(
            f"the sample has {len(sample)} parts, and {type(net).__name__}.forward{signature} does not take"
            f" them ({error}); pass as sample what the network is called with, without targets"
        ) from None
    return net(*sample)


@contextmanager
def untouched(net: nn.Module, training: bool | None = None) -> Iterator[None]:
    """Buffers, modes and random state are put back afterwards; ``training`` is the mode within."""
    buffers = [(buffer, buffer.clone()) for buffer in net.buffers()]
    modes = [(module, module.training) for module in net.modules()]
    if training is not None:
        net.train(training)
    try:
        with TorchStream(0), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a network says of a dry forward is not meant for its user
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


@contextmanager
def layer_by_layer() -> Iterator[None]:
    """Torch's transformers do not fuse layers inside, so hooks and counters see all of them."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def forward_flops(net: nn.Module, sample: Any) -> float:
    """Of one forward of the sample; at least 1."""
    with untouched(net, training=False), layer_by_layer(), torch.no_grad(), flop_counter() as counter:
        call(net, sample)
    return float(max(counter.get_total_flops(), 1))


def dry_forward(net: nn.Module, sample: Any) -> tuple[list[Call], Any]:
    """Every call of a submodule, in the order in which they end, and the network's output; nothing stays."""
    calls: list[Call] = []
    handles = []
    for path, module in net.named_modules():
        if path:

            def look(_m: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
                calls.append(Call(path, args, kwargs, output))

            handles.append(module.register_forward_hook(look, with_kwargs=True))
    try:
        with untouched(net, training=False), layer_by_layer(), torch.no_grad():
            result = call(net, sample)
    except HostError:
        raise
    except Exception as error:
        raise HostError(
            f"{type(net).__name__} fails on the sample: {type(error).__name__}: {error}. Say with sample= how"
            " it is called: by a tensor, a tuple of arguments or a dict of named ones"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return calls, result


def find_sites(net: nn.Module, slots: str | Sequence[str], sample: Any) -> list[Site]:
    """The sites that ``slots`` names (``auto``, names, globs), in the order in which the forward meets them.

    ``encoder:hidden`` grows the tensor named (or numbered) ``hidden`` in what ``encoder`` returns, rather
    than the first one.
    """
    calls, result = dry_forward(net, sample)
    by_path: dict[str, list[Call]] = {}
    for each in calls:
        by_path.setdefault(each.path, []).append(each)
    if slots == "auto":
        chosen = _auto(net, by_path, result)
    else:
        wanted = [slots] if isinstance(slots, str) or not isinstance(slots, Iterable) else list(slots)
        if not all(isinstance(name, str) for name in wanted):
            kind = type(net).__name__
            raise HostError(f"slots is {slots!r}; name submodules of {kind} by text, as '0', or pass 'auto'")
        chosen = [_site(net, name, key, by_path) for name, key in _named(net, wanted)]
    for site in chosen:
        same = [other.name for other in chosen if other.path == site.path]
        if len(same) > 1:
            raise HostError(
                f"slots {' and '.join(same)} are one place, the output of '{site.path}'; name it once"
            )
    ends = {path: index for index, path in enumerate(by_path)}
    return sorted(chosen, key=lambda site: ends[site.path])


def _named(net: nn.Module, patterns: Sequence[str]) -> Iterator[tuple[str, str]]:
    names = [name for name, _ in net.named_modules(remove_duplicate=False) if name]
    seen = set()
    for pattern in patterns:
        glob, _, key = pattern.partition(":")
        hits = [name for name in names if _matches(name, glob)]
        if not hits:
            hint = "Patterns such as layer?.0 and 'auto' work too."
            raise UnknownNameError(f"submodule of {type(net).__name__} for a slot", glob, names, hint)
        for name in hits:
            if name not in seen:
                seen.add(name)
                yield name, key
    if not seen:
        raise HostError(f"no slot was named; the submodules of {type(net).__name__} are {', '.join(names)}")


def _matches(name: str, glob: str) -> bool:
    """Whether a path is what a glob means, part by part: ``layers.*`` are children, not what they hold."""
    parts, patterns = name.split("."), glob.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _site(net: nn.Module, name: str, key: str, by_path: Mapping[str, list[Call]]) -> Site:
    """The site that ``name`` means, or a sentence why it is none."""
    module = net.get_submodule(name)
    kind = type(module).__name__
    path = next(path for path, other in net.named_modules() if other is module)
    calls = by_path.get(path, [])
    if len(calls) != 1:
        raise HostError(
            f"submodule '{name}' ({kind}) runs {len(calls)} times in one forward; a slot needs a submodule"
            " that runs exactly once"
        )
    carrier = _carrier(net, path, by_path)
    if carrier is None:
        raise HostError(
            f"submodule '{name}' ({kind}) is a container that hands on something else than its last child's"
            " output; name one of its children"
        )
    found = by_path[carrier][0]
    output = _locate(found.output, key)
    features = None if output is None else output.features(found.output)
    if output is None or not isinstance(features, Tensor) or features.ndim not in _TOPOLOGY_OF_RANK:
        raise HostError(
            f"submodule '{name}' ({kind}) returns {_described(found.output)}; a slot needs floats"
            " [batch, channels, height, width], [batch, tokens, width] or [batch, width], alone or first (or"
            " named, as in 'name:key') in a tuple, a dict or a dataclass"
        )
    topology = _TOPOLOGY_OF_RANK[features.ndim]
    if topology == "feature_map" and _is_width_last(net.get_submodule(carrier)):
        raise HostError(
            f"submodule '{name}' ({kind}) returns {_described(found.output)} with its width last; seeds take"
            " four axes as [batch, channels, height, width], so name a submodule that hands on that"
        )
    swap = _swap(net, carrier, by_path) if topology == "tokens" else None
    shape = tuple(features.transpose(*swap).shape if swap else features.shape)
    width = shape[1] if topology == "feature_map" else shape[-1]
    copyable = output.holder == "tensor" and _is_block(net.get_submodule(carrier), found)
    return Site(name, carrier, topology, width, shape, output, swap, copyable)


def _carrier(net: nn.Module, path: str, by_path: Mapping[str, list[Call]]) -> str | None:
    """``path``, or for a container the child whose output is its own; None where there is no such child."""
    module = net.get_submodule(path)
    if not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return path
    for name, child in reversed(list(module.named_children())):
        below = next(p for p, other in net.named_modules() if other is child)
        calls = by_path.get(below, [])
        if len(calls) == 1 and calls[0].output is by_path[path][0].output and below == f"{path}.{name}":
            return _carrier(net, below, by_path)
    return None


def _locate(output: Any, key: str) -> Output | None:
    """Where the features are: at ``key``, or the first tensor of floats."""
    if isinstance(output, Tensor):
        return Output("tensor") if output.is_floating_point() and not key else None
    holder: Holder
    entries: list[tuple[Any, Any]]
    if dataclasses.is_dataclass(output):
        holder = "dataclass"
        entries = [(field.name, getattr(output, field.name)) for field in dataclasses.fields(output)]
    elif isinstance(output, tuple) and hasattr(output, "_fields"):
        holder, entries = "namedtuple", list(zip(output._fields, output, strict=True))
    elif isinstance(output, tuple | list):
        holder, entries = "tuple" if isinstance(output, tuple) else "list", list(enumerate(output))
    elif isinstance(output, dict):
        holder, entries = "mapping", list(output.items())
    else:
        return None
    wanted = [name for name, value in entries if (str(name) == key if key else _is_features(value))]
    return Output(holder, wanted[0]) if wanted else None


def _is_features(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim in _TOPOLOGY_OF_RANK


def _described(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"{output.dtype} of shape {tuple(output.shape)}"
    return type(output).__name__


_CHANNELS_FIRST: Final = (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.InstanceNorm1d)
_CHANNELS_LAST: Final = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.RNNBase, nn.MultiheadAttention)


def _swap(net: nn.Module, path: str, by_path: Mapping[str, list[Call]]) -> tuple[int, int] | None:
    """Axes to exchange, by the last layer before that says where channels are, and by ``batch_first``."""
    until = list(by_path).index(path) + 1
    for earlier in reversed(list(by_path)[:until]):
        module = net.get_submodule(earlier)
        if isinstance(module, _CHANNELS_FIRST):
            return (1, 2)
        if isinstance(module, _CHANNELS_LAST):
            break
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        around = net.get_submodule(".".join(parts[:end])).modules()
        said = [m.batch_first for m in around if isinstance(m, nn.RNNBase | nn.MultiheadAttention)]
        if said:
            return None if all(said) else (0, 1)
    return None


def _is_width_last(module: nn.Module) -> bool:
    """Whether the layer itself says so. Subclasses may not: LayerNorms of images exchange axes within."""
    is_last = type(module) in (nn.Linear, nn.Embedding)
    return is_last or (type(module) is nn.LayerNorm and len(module.normalized_shape) == 1)


def _is_block(module: nn.Module, found: Call) -> bool:
    """Whether the module was called with one tensor and nothing else, and kept its shape.

    An attention mask counts even where it is None: transformers leaves it out for batches without padding.
    """
    named = inspect.signature(module.forward).bind(*found.args, **found.kwargs).arguments
    given = [value for value in named.values() if isinstance(value, Tensor) or value]
    return (
        any(True for _ in module.children())
        and not any("attention_mask" in name for name in named)
        and len(given) == 1
        and isinstance(given[0], Tensor)
        and given[0].shape == found.output.shape
    )


# --- which places to take where none is named ---------------------------------------------------------------


def _auto(net: nn.Module, by_path: Mapping[str, list[Call]], result: Any) -> list[Site]:
    """Outermost blocks that the network repeats, else its layers with weights; not the output itself."""
    blocks = _repeated(net, by_path)
    graphs = (path for path, module in net.named_modules() if isinstance(module, fx.GraphModule))
    grown = tuple(f"{path}." for path in graphs if path.split(".")[-1].startswith(GROWN))
    places = blocks or [
        p
        for p in by_path
        if not p.startswith(grown)  # halves of a seed that an earlier growth has finished
        and any(True for _ in net.get_submodule(p).parameters(recurse=False))
    ]
    ends = tensors_in(result)
    found: list[Site] = []
    for path in places:
        try:
            site = _site(net, path, "", by_path)
        except HostError:
            continue
        output = by_path[site.path][0].output
        if not any(tensor is end for tensor in tensors_in(output) for end in ends):
            found.append(site)
    if not found:
        raise HostError(
            f"slots='auto' finds no place in {type(net).__name__}: no layer runs exactly once and hands on"
            " features; name submodules with slots=[…]"
        )
    # The last place of every stretch of equal length: depth is covered, and the last place is in.
    count = min(len(found), MOST_AUTO_SITES)
    return [found[round((i + 1) * len(found) / count) - 1] for i in range(count)]


def _repeated(net: nn.Module, by_path: Mapping[str, list[Call]]) -> list[str]:
    """Outermost modules with children whose class occurs more than once, in order of execution."""
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    inner = {p: m for p, m in net.named_modules() if p in by_path and not isinstance(m, containers)}
    parents = {path: type(m) for path, m in inner.items() if any(True for _ in m.children())}
    kinds = list(parents.values())
    blocks = [path for path, kind in parents.items() if kinds.count(kind) > 1]
    outermost = {p for p in blocks if not any(p.startswith(f"{other}.") for other in blocks if other != p)}
    return [path for path in by_path if path in outermost]


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists, dicts and dataclasses."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [tensor for value in tree.values() for tensor in tensors_in(value)]
    if isinstance(tree, tuple | list):
        return [tensor for value in tree for tensor in tensors_in(value)]
    if dataclasses.is_dataclass(tree):
        return tensors_in([getattr(tree, field.name) for field in dataclasses.fields(tree)])
    return []


assert set(get_args(Topology)) == set(_TOPOLOGY_OF_RANK.values())
