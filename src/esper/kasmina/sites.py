"""Sites: submodules of a network after which a seed can be planted; a built-in host lists its sites, other
networks are searched by a forward pass.

A site is a submodule that runs exactly once per forward and returns a tensor of features, alone or inside a
tuple, a dict or a dataclass. Containers do not change: a site that is named after a ``Sequential`` is
attached to its last child, which returns the same tensor.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor, fx, nn

from esper.kasmina.blueprints import Topology, specs_for
from esper.kasmina.dry_run import Call, dry_forward, tensors_in, tensors_read
from esper.kasmina.edits import Insertion
from esper.kasmina.insertion_search import find_insertion, is_element
from esper.kasmina.pair_search import with_pair
from esper.kasmina.widening import Pair
from esper.leyline.errors import HostError, UnknownNameError

MOST_AUTO_SITES: Final = 8
"""Largest number of sites that ``slots="auto"`` selects, spread over the depth of the network."""
GROWN: Final = "grown"
"""Name of the child module that contains a seed after ``finish`` has replaced its slot."""
_TOPOLOGY_OF_RANK: Final[Mapping[int, Topology]] = {4: "feature_map", 3: "tokens", 2: "features"}

Holder = Literal["tensor", "tuple", "list", "namedtuple", "mapping", "dataclass"]
"""Kind of return value of a submodule: the feature tensor, or a container with it."""
_UNTRIED: Final = "none of the blueprints that may be planted needs one"
fx.wrap("replace")


class Output(NamedTuple):
    """Position of the features inside the return value of a submodule."""

    holder: Holder
    key: Any = None
    """Index or name of the feature tensor in the return value; None if the return value is the tensor."""

    def features(self, output: Any) -> Any:
        """Return the feature tensor in the return value of a submodule."""
        if self.holder == "tensor":
            return output
        return getattr(output, self.key) if self.holder in {"namedtuple", "dataclass"} else output[self.key]

    def replaced(self, output: Any, features: Tensor) -> Any:
        """Return ``output`` with its feature tensor replaced, as an object of the same type; ``torch.fx`` can
        trace this method."""
        holder, key = self
        if holder == "tensor":
            return features
        if holder == "tuple":
            return output[:key] + (features,) + output[key + 1 :]  # noqa: RUF005  a proxy cannot be unpacked
        if holder == "list":
            return output[:key] + [features] + output[key + 1 :]  # noqa: RUF005
        if holder == "namedtuple":
            return output._replace(**{key: features})
        if holder == "dataclass":
            return replace(output, **{key: features})
        return output | {key: features}


_WHOLE: Final = Output("tensor")


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """Submodule after which a seed can be planted, with the shape of its features."""

    name: str
    """Name of the site in ``slots`` and in messages, such as ``layer2``."""
    path: str
    """Path of the submodule that has the slot as a child, such as ``layer2.1``."""
    topology: Topology
    width: int
    shape: tuple[int, ...]
    """Shape of the features that a seed receives, with the batch axis."""
    output: Output = _WHOLE
    swap: tuple[int, int] | None = None
    """Axes to transpose for the seed: those of tokens and batch, or of width and tokens; None if features are
    in the order that seeds require."""
    block: str | None = None
    """Path of the block that a ``stack`` seed copies; the block maps one tensor to a tensor of the same
    shape. The path is None if there is no block to copy."""
    channels_last: bool = False
    """Whether feature maps at the site, and weights of its seeds, have the memory format
    ``torch.channels_last``."""
    insertion: Insertion | None = None
    """Where a copy of the submodule is inserted as a further block of the network; None if a copied block
    becomes a side module."""
    refusal: str | None = None
    """Reason why there is no insertion."""
    pair: Pair | None = None
    """Layers between which hidden units can be added; None if there are none."""
    no_pair: str | None = None
    """Reason why there is no pair of layers."""


def find_sites(
    net: nn.Module, slots: str | Sequence[str], sample: Any, blueprints: Collection[str] | None = None
) -> list[Site]:
    """Return the sites for ``slots``, in the order of the forward pass.

    Args:
        net: Network without slots.
        slots: Names or globs of submodules, or ``"auto"``. A name ``encoder:hidden`` selects the output with
            name or number ``hidden`` of ``encoder``; a name without suffix selects the first tensor.
        sample: Input that the network is called with.
        blueprints: Names of the blueprints that may be planted; all unless given.

    Raises:
        HostError: A submodule cannot have a slot, or ``slots`` is empty.
        UnknownNameError: A name or glob matches no submodule.
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
    for index, site in enumerate(chosen):
        specs = [s for s in specs_for(site.topology) if blueprints is None or s.name in blueprints]
        if any(spec.copies for spec in specs):
            chosen[index] = _with_insertion(net, site, by_path[site.path][0], sample)
        if any(spec.widens for spec in specs):
            chosen[index] = with_pair(net, chosen[index], calls, result, sample)
    return sorted(chosen, key=lambda site: ends[site.path])


def _with_insertion(net: nn.Module, site: Site, found: Call, sample: Any) -> Site:
    """Return the site with the insertion of a copied block behind it, or with the reason against one.

    Only a block that is an attribute of its own can be copied as a side module instead.
    """
    try:
        insertion = find_insertion(net, site.path, found, site.output.features, sample)
    except HostError as error:
        is_block = site.output.holder == "tensor" and _is_block(net.get_submodule(site.path), found)
        block = site.path if is_block and not is_element(net, site.path) else None
        return replace(site, refusal=str(error), block=block)
    return replace(site, insertion=insertion, block=site.path, refusal=None)


def check_modes(net: nn.Module, sites: Sequence[Site], sample: Any) -> None:
    """Raise HostError if the forward pass fails in training mode, or if a site returns another type in
    training mode than in evaluation mode.
    """
    calls, _ = dry_forward(net, sample, training=True)
    for site in sites:
        outputs = [each.output for each in calls if each.path == site.path]
        found = _locate(outputs[0], "") if len(outputs) == 1 else None
        if len(outputs) != 1 or found is None or found.holder != site.output.holder:
            how = f"returns {_described(outputs[0])}" if len(outputs) == 1 else f"runs {len(outputs)} times"
            raise HostError(
                f"submodule '{site.name}' {how} in training mode, and returns a {site.output.holder} in"
                " evaluation mode, once per forward; name a submodule that is the same in both as the slot"
            )


def _named(net: nn.Module, patterns: Sequence[str]) -> Iterator[tuple[str, str]]:
    names = [name for name, _ in net.named_modules(remove_duplicate=False) if name]
    seen = set()
    for pattern in patterns:
        if list(patterns).count(pattern) > 1:
            raise HostError(f"slot '{pattern}' is named twice; name it once")
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
    """Return whether a glob matches a path component by component: ``layers.*`` matches children only."""
    parts, patterns = name.split("."), glob.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _site(net: nn.Module, name: str, key: str, by_path: Mapping[str, list[Call]]) -> Site:
    """Return the site of the submodule ``name``; raise HostError if the submodule cannot have a slot."""
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
    channels_last = topology == "feature_map" and not features.is_contiguous()
    channels_last = channels_last and features.is_contiguous(memory_format=torch.channels_last)
    known = (name, carrier, topology, width, shape, output, swap)
    return Site(*known, channels_last=channels_last, refusal=_UNTRIED, no_pair=_UNTRIED)


def _carrier(net: nn.Module, path: str, by_path: Mapping[str, list[Call]]) -> str | None:
    """Return the path of the module that computes the output of ``path``: ``path`` itself or, for a
    container, one of its children; None if no child does.
    """
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
    """Return the position of the features in ``output``: the entry ``key``, or the first tensor of floats."""
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
    """Return the axes to transpose so that features become ``[batch, tokens, width]``; None if they already
    are.

    The order of the axes follows from the nearest layer, at or before ``path``, with a known channel axis,
    and from the option ``batch_first`` of recurrent and attention layers.
    """
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
        batch_firsts = [m.batch_first for m in around if isinstance(m, nn.RNNBase | nn.MultiheadAttention)]
        if batch_firsts:
            return None if all(batch_firsts) else (0, 1)
    return None


def _is_width_last(module: nn.Module) -> bool:
    """Return whether the last axis of the module's output is certainly the width; subclasses of torch's
    layers are excluded, because they may transpose."""
    is_last = type(module) in (nn.Linear, nn.Embedding)
    return is_last or (type(module) is nn.LayerNorm and len(module.normalized_shape) == 1)


def _is_block(module: nn.Module, found: Call) -> bool:
    """Return whether the module is a block: it has children, was called with one tensor only, and returned a
    tensor of the same shape.

    A module that was called with an attention mask is no block, even if the mask was None: the library
    transformers passes a mask only for padded batches.
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


# --- automatic choice of sites ------------------------------------------------------------------------------


def _auto(net: nn.Module, by_path: Mapping[str, list[Call]], result: Any) -> list[Site]:
    """Return sites for ``slots="auto"``: after each of the outermost repeated blocks or, if there are none,
    after each layer with weights. An output of the network that no module reads is never a site."""
    blocks = _blocks(net, by_path)
    graphs = (path for path, module in net.named_modules() if isinstance(module, fx.GraphModule))
    grown = tuple(f"{path}." for path in graphs if path.split(".")[-1].startswith(GROWN))
    places = blocks or [
        p
        for p in by_path
        if not p.startswith(grown)  # Modules of seeds from an earlier growth are skipped.
        and any(True for _ in net.get_submodule(p).parameters(recurse=False))
    ]
    ends = {id(tensor) for tensor in tensors_in(result)} - tensors_read(by_path.values())
    found: list[Site] = []
    for path in places:
        try:
            site = _site(net, path, "", by_path)
        except HostError:
            continue
        output = by_path[site.path][0].output
        if not any(id(tensor) in ends for tensor in tensors_in(output)):
            found.append(site)
    if not found:
        raise HostError(
            f"slots='auto' finds no place in {type(net).__name__}: no layer runs exactly once and hands on"
            " features; name submodules with slots=[…]"
        )
    # The sites are divided into ``count`` groups of equal size, and the last site of each group is chosen.
    count = min(len(found), MOST_AUTO_SITES)
    return [found[round((i + 1) * len(found) / count) - 1] for i in range(count)]


def _blocks(net: nn.Module, by_path: Mapping[str, list[Call]]) -> list[str]:
    """Return the paths of the outermost blocks in the order of execution: modules with children that are not
    the only such module of their class, or that are in a list of modules of one class."""
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    inner = {p: m for p, m in net.named_modules() if p in by_path and not isinstance(m, containers)}
    parents = {path: type(m) for path, m in inner.items() if any(True for _ in m.children())}
    kinds = list(parents.values())
    blocks = [p for p, kind in parents.items() if kinds.count(kind) > 1 or _is_listed(net, p)]
    outermost = {p for p in blocks if not any(p.startswith(f"{other}.") for other in blocks if other != p)}
    return [path for path in by_path if path in outermost]


def _is_listed(net: nn.Module, path: str) -> bool:
    """Return whether the module is in a ``ModuleList``, or in a ``Sequential``, of modules of its class."""
    around = net.get_submodule(path.rpartition(".")[0])
    kinds = {type(module) for module in around.children()}
    return isinstance(around, nn.ModuleList | nn.Sequential) and len(kinds) == 1


assert set(get_args(Topology)) == set(_TOPOLOGY_OF_RANK.values())
