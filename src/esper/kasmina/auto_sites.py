"""Automatic choice of sites: blocks or, if there are none, layers."""

from __future__ import annotations

from typing import Final

from torch import fx, nn

from esper.kasmina.dry_run import tensors_in
from esper.kasmina.feature_output import find_output
from esper.kasmina.probes import Probes

MOST_AUTO_SITES: Final = 8
"""Largest number of sites that ``slots="auto"`` selects."""
GROWN: Final = "grown"
"""Name of the child module that contains a seed after ``finish`` has replaced its slot."""
_CONTAINERS: Final = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def auto_paths(probes: Probes) -> list[str]:
    """Return the paths of the submodules for ``slots="auto"`` in the order of execution: the outermost
    repeated blocks; if there are none, every ``Sequential`` inside a ``Sequential``; otherwise every layer
    with weights.

    The paths do not include embeddings, which read no features; the final head and unread outputs; routers
    and experts; modules that compute weights; and seeds of an earlier growth.
    """
    net = probes.net
    graphs = [path for path, module in net.named_modules() if isinstance(module, fx.GraphModule)]
    grown = tuple(f"{path}." for path in graphs if path.split(".")[-1].startswith(GROWN))
    experts = tuple(_experts(probes))
    paths = [
        path
        for path, calls in probes.by_path.items()
        if not path.startswith((*grown, *experts))
        and "parametrizations" not in path.split(".")
        and any(tensor.is_floating_point() for tensor in tensors_in([calls[0].args, calls[0].kwargs]))
        and probes.is_hidden(path)
    ]
    return _blocks(net, paths) or _stages(net, paths) or [path for path in paths if _has_weights(net, path)]


def _has_weights(net: nn.Module, path: str) -> bool:
    return any(True for _ in net.get_submodule(path).parameters(recurse=False))


def _experts(probes: Probes) -> list[str]:
    """Return the paths, with a dot, of the lists of experts: lists with one element per score of a router."""
    found = []
    for path in probes.routers:
        scores = probes.by_path[path][0].output
        output = find_output(scores)
        parent = path.rpartition(".")[0]
        for name, child in probes.net.get_submodule(parent).named_children():
            if isinstance(child, nn.ModuleList) and output is not None:
                is_scored = len(child) == output.features(scores).shape[-1]
                found += [f"{parent}.{name}.".lstrip(".")] * is_scored
    return found


def _blocks(net: nn.Module, paths: list[str]) -> list[str]:
    """Return the outermost blocks in ``paths``: modules with children that are not the only such module of
    their class, or that are in a list of modules of one class."""
    inner = {path: net.get_submodule(path) for path in paths}
    parents = {
        path: type(module)
        for path, module in inner.items()
        if not isinstance(module, _CONTAINERS) and any(True for _ in module.children())
    }
    kinds = list(parents.values())
    return _outermost([p for p, kind in parents.items() if kinds.count(kind) > 1 or _is_listed(net, p)])


def _stages(net: nn.Module, paths: list[str]) -> list[str]:
    """Return the outermost in ``paths`` of the ``Sequential`` modules with weights that are children of a
    ``Sequential``."""

    def is_stage(path: str) -> bool:
        module, around = net.get_submodule(path), net.get_submodule(path.rpartition(".")[0])
        is_nested = isinstance(module, nn.Sequential) and isinstance(around, nn.Sequential)
        return is_nested and any(True for _ in module.parameters())

    return _outermost([path for path in paths if is_stage(path)])


def _outermost(paths: list[str]) -> list[str]:
    return [p for p in paths if not any(p.startswith(f"{other}.") for other in paths if other != p)]


def _is_listed(net: nn.Module, path: str) -> bool:
    """Return whether the module is in a ``ModuleList``, or in a ``Sequential``, of modules of its class."""
    around = net.get_submodule(path.rpartition(".")[0])
    kinds = {type(module) for module in around.children()}
    return isinstance(around, nn.ModuleList | nn.Sequential) and len(kinds) == 1
