"""Sites: submodules of a network after which a seed can be planted; a built-in host lists its sites, other
networks are searched by a forward pass.

A site is a submodule that returns a tensor of features, alone or inside a tuple, a dict or a dataclass. If it
runs several times in a forward pass, as a shared encoder does, its seed takes part in every call. Containers
do not change: a site that is named after a ``Sequential`` is attached to its last child, which returns the
same tensor.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import inspect
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, get_args

import torch
from torch import Tensor, nn

from esper.kasmina.auto_sites import MOST_AUTO_SITES, auto_paths
from esper.kasmina.blueprints import Topology, specs_for
from esper.kasmina.blueprints.tokens import MIXING
from esper.kasmina.dry_run import dry_forward
from esper.kasmina.edits import Insertion
from esper.kasmina.feature_axes import swapped_axes
from esper.kasmina.feature_output import Output, described, find_output
from esper.kasmina.insertion_search import find_insertion, is_element
from esper.kasmina.padding_mask import find_mask, takes_mask
from esper.kasmina.pair_search import with_pair
from esper.kasmina.probes import Probes
from esper.kasmina.widening import Pair
from esper.leyline.errors import HostError, UnknownNameError

_TOKENS: Final = 3
"""Number of axes of tokens, and largest number of axes of features with the width last."""
_TOPOLOGY_OF_RANK: Final[Mapping[int, Topology]] = {5: "volume", 4: "feature_map", 3: "tokens", 2: "features"}
_UNTRIED: Final = "none of the blueprints that may be planted needs one"

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
    """Axes to transpose for the seed: those of tokens and batch, of width and tokens, or of channels and a
    spatial axis; None if features are in the order that seeds require."""
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
    times: float = 1.0
    """Number of calls of the submodule in one forward pass, each weighted by the size of its features divided
    by that of the first call."""
    is_causal: bool = True
    """Whether a seed for tokens must not use later tokens."""
    mask: tuple[int | str, bool] | None = None
    """Fields of the ``PaddingMask`` that the submodule gets; None if it gets none."""
    hides_mask: bool = False
    """Whether the network takes a mask that the submodule does not get."""


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
    probes = Probes(net, sample)
    if slots == "auto":
        chosen = _auto(probes)
    else:
        wanted = [slots] if isinstance(slots, str) or not isinstance(slots, Iterable) else list(slots)
        if not all(isinstance(name, str) for name in wanted):
            kind = type(net).__name__
            raise HostError(f"slots is {slots!r}; name submodules of {kind} by text, as '0', or pass 'auto'")
        chosen = [_site(probes, name, key) for name, key in _named(net, wanted)]
    for site in chosen:
        same = [other.name for other in chosen if other.path == site.path]
        if len(same) > 1:
            raise HostError(
                f"slots {' and '.join(same)} are one place, the output of '{site.path}'; name it once"
            )
    ends = {path: index for index, path in enumerate(probes.by_path)}
    for index, site in enumerate(chosen):
        specs = [s for s in specs_for(site.topology) if blueprints is None or s.name in blueprints]
        if any(spec.copies for spec in specs):
            chosen[index] = _with_insertion(probes, site)
        if any(spec.widens for spec in specs):
            chosen[index] = with_pair(net, chosen[index], probes.calls, probes.result, sample)
        if any(spec.name in MIXING for spec in specs):
            chosen[index] = _with_order(probes, chosen[index])
    return sorted(chosen, key=lambda site: ends[site.path])


def _with_insertion(probes: Probes, site: Site) -> Site:
    """Return the site with the insertion of a copied block behind it, or with the reason against one.

    The block is the submodule of the site or, if that is the last child of a ``Sequential``, the
    ``Sequential``. Only a block that is an attribute of its own can be copied as a side module instead.
    """
    net, refusal = probes.net, ""
    blocks = _containers(net, site)
    for path in blocks:
        try:
            found = probes.by_path[path]
            insertion = find_insertion(net, path, found, site.output.features, probes.sample)
        except HostError as error:
            refusal = str(error)
            continue
        return replace(site, insertion=insertion, block=path, refusal=None)
    copied = (path for path in blocks if not is_element(net, path) and _is_block(probes, site, path))
    return replace(site, refusal=refusal, block=next(copied, None))


def _containers(net: nn.Module, site: Site) -> list[str]:
    """Return the paths of the submodule of a site and of the containers around it that return its output."""
    outermost, found = _first_path(net, net.get_submodule(site.name)), [site.path]
    while found[-1] != outermost:
        found.append(found[-1].rpartition(".")[0])
    return found


def _with_order(probes: Probes, site: Site) -> Site:
    """Return a site of tokens with the order of tokens, and with the mask that its submodule gets."""
    if site.topology != "tokens":
        return site

    def swap_of(path: str) -> tuple[int, int] | None:
        found = find_output(probes.by_path[path][0].output)
        assert found is not None
        try:
            return swapped_axes(probes, path, found)
        except HostError:
            return None

    is_causal = probes.is_causal(site.path, site.output, swap_of)
    module, call = probes.net.get_submodule(site.path), probes.by_path[site.path][0]
    mask = find_mask(module, call, site.shape[1])
    hides = mask is None and takes_mask(probes.net)
    return replace(site, is_causal=is_causal, mask=mask and (mask.key, mask.marks_padding), hides_mask=hides)


def check_modes(net: nn.Module, sites: Sequence[Site], sample: Any) -> None:
    """Raise HostError if the forward pass fails in training mode, or if a site returns another type in
    training mode than in evaluation mode.
    """
    calls, _ = dry_forward(net, sample, training=True)
    for site in sites:
        outputs = [each.output for each in calls if each.path == site.path]
        found = [find_output(output) for output in outputs]
        if not found or any(each is None or each.holder != site.output.holder for each in found):
            how = f"returns {described(outputs[0])}" if outputs else "runs 0 times"
            raise HostError(
                f"submodule '{site.name}' {how} in training mode, and returns a {site.output.holder} in"
                " evaluation mode; name a submodule that is the same in both as the slot"
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


def _site(probes: Probes, name: str, key: str = "") -> Site:
    """Return the site of the submodule ``name``; raise HostError if the submodule cannot have a slot."""
    net, by_path = probes.net, probes.by_path
    module = net.get_submodule(name)
    path, kind = _first_path(net, module), type(module).__name__
    if "parametrizations" in path.split("."):
        raise HostError(f"submodule '{name}' ({kind}) computes a weight, not features; name a layer or block")
    if path not in by_path:
        raise HostError(f"submodule '{name}' ({kind}) runs 0 times in one forward; name one that runs")
    carrier = _carrier(probes, path)
    if carrier is None:
        raise HostError(
            f"submodule '{name}' ({kind}) is a container that hands on something else than its last child's"
            " output; name one of its children"
        )
    calls = by_path[carrier]
    output = find_output(calls[0].output, key)
    found = [] if output is None else [output.features(each.output) for each in calls]
    if output is None or not all(_is_possible(each, found[0]) for each in found):
        raise HostError(
            f"submodule '{name}' ({kind}) returns {' and '.join(described(each.output) for each in calls)}; a"
            " slot needs floats [batch, channels, height, width], [batch, tokens, width] or [batch, width],"
            " alone or first (or named, as in 'name:key') in a tuple, a dict or a dataclass, with the same"
            " number of axes in every call"
        )
    try:
        swap = swapped_axes(probes, carrier, output)
    except HostError as error:
        raise HostError(
            f"submodule '{name}' ({kind}) returns {described(calls[0].output)}: {error}, so no seed could"
            " have a fixed width; name another submodule"
        ) from None
    if not probes.is_read(carrier, output):
        raise HostError(
            f"the output of {type(net).__name__} does not depend on submodule '{name}' ({kind}), so a seed"
            " there could not learn; name another submodule"
        )
    features = found[0]
    shapes = [tuple(h.transpose(*swap).shape if swap else h.shape) for h in found]
    topology = _TOPOLOGY_OF_RANK[features.ndim]
    axis = 1 if features.ndim > _TOKENS else -1
    if len({shape[axis] for shape in shapes}) > 1:
        raise HostError(
            f"submodule '{name}' ({kind}) returns features of several widths,"
            f" {' and '.join(str(shape[axis]) for shape in shapes)}; name a submodule with one width"
        )
    channels_last = topology == "feature_map" and swap is None and not features.is_contiguous()
    channels_last = channels_last and features.is_contiguous(memory_format=torch.channels_last)
    times = sum(h.numel() for h in found) / features.numel()
    shape = shapes[0]
    known = (name, carrier, topology, shape[axis], shape, output, swap, None, channels_last)
    return Site(*known, refusal=_UNTRIED, no_pair=_UNTRIED, times=times)


def _is_possible(features: Any, first: Any) -> bool:
    is_float = isinstance(features, Tensor) and features.is_floating_point()
    return is_float and features.ndim in _TOPOLOGY_OF_RANK and features.ndim == first.ndim


def _first_path(net: nn.Module, module: nn.Module) -> str:
    """Return the path under which a submodule that may have several is recorded."""
    return next(path for path, other in net.named_modules() if other is module)


def _carrier(probes: Probes, path: str) -> str | None:
    """Return the path of the module that computes the output of ``path``: ``path`` itself or, for a
    container, one of its children; None if no child does.
    """
    module = probes.net.get_submodule(path)
    if not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return path
    outputs = [each.output for each in probes.by_path[path]]
    for name, child in reversed(list(module.named_children())):
        below = _first_path(probes.net, child)
        inner = [each.output for each in probes.by_path.get(below, [])]
        is_same = len(inner) == len(outputs) and all(map(operator.is_, inner, outputs))
        if is_same and below == f"{path}.{name}":
            return _carrier(probes, below)
    return None


def _is_block(probes: Probes, site: Site, path: str) -> bool:
    """Return whether the module is a block: it has children, is called with one tensor only, and returns a
    tensor of the same shape.

    A module that was called with an attention mask is no block, even if the mask was None: the library
    transformers passes a mask only for padded batches.
    """
    module = probes.net.get_submodule(path)
    if site.output.holder != "tensor" or not any(True for _ in module.children()):
        return False
    signature = inspect.signature(module.forward)
    for each in probes.by_path[path]:
        named = signature.bind(*each.args, **each.kwargs).arguments
        given = [value for value in named.values() if isinstance(value, Tensor) or value]
        if any("attention_mask" in name for name in named) or len(given) != 1:
            return False
        if not isinstance(given[0], Tensor) or given[0].shape != each.output.shape:
            return False
    return True


def _auto(probes: Probes) -> list[Site]:
    """Return sites for ``slots="auto"``, at most ``MOST_AUTO_SITES``, spread over the depth of the
    network."""
    found: list[Site] = []
    for path in auto_paths(probes):
        try:
            found.append(_site(probes, path))
        except HostError:
            continue
    if not found:
        raise HostError(
            f"slots='auto' finds no place in {type(probes.net).__name__}: no layer before the last one hands"
            " on features; name submodules with slots=[…]"
        )
    # The sites are divided into ``count`` groups of equal size, and the last site of each group is chosen.
    count = min(len(found), MOST_AUTO_SITES)
    return [found[round((i + 1) * len(found) / count) - 1] for i in range(count)]


assert set(get_args(Topology)) == set(_TOPOLOGY_OF_RANK.values())
