"""Search for pairs of layers between which hidden units can be added, with a trial of every pair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from esper.kasmina.blueprints import blueprint_named
from esper.kasmina.dry_run import Call, dry_forward, tensors_in
from esper.kasmina.insertion_search import are_equal, rebuildable, rebuilt
from esper.kasmina.random_streams import TorchStream
from esper.kasmina.transaction import names_width
from esper.kasmina.widening import Layer, Pair, PairLayers, Setting, WidthGraft
from esper.leyline.errors import HostError
from esper.leyline.factored_actions import Style

if TYPE_CHECKING:
    from esper.kasmina.sites import Site

_VECTORS: Final = ("weight", "bias", "running_mean", "running_var")
"""Names of tensors of first layers and normalisations with one row per hidden unit."""


class _NoPairError(Exception):
    """Hidden units cannot be added between two layers; the message states the reason."""


_SHAPE_ERRORS: Final = (RuntimeError, ValueError, AssertionError)
"""Errors that networks raise if features have an unexpected shape."""


def with_pair(net: nn.Module, site: Site, calls: Sequence[Call], output: Any, sample: Any) -> Site:
    """Return the site with the pair of layers between which hidden units can be added, after a trial, or with
    the reason why there is none.

    If the submodule of the site is a layer, it is a first layer of the pair; otherwise the pair is the last
    one inside the submodule. In the trial, new units leave all outputs of the network bit-equal if their
    outgoing weights are zero, and change an output otherwise.

    Args:
        net: Network without slots; unchanged afterwards.
        site: Position of the slot.
        calls: Recorded calls of all submodules.
        output: Output of the network in which the calls were recorded.
        sample: Input that the network is called with.

    Raises:
        HostError: The forward pass fails for another reason than the shape of its features.
    """
    reason = ""
    for pair in _candidates(net, site.path, calls):
        try:
            _check_weights(net, pair)
            _try(net, site, pair, tensors_in(output), sample)
        except _NoPairError as error:
            reason = reason or str(error)
            continue
        return replace(site, pair=pair._replace(setting=_find_setting(net, pair)), no_pair=None)
    return replace(site, no_pair=reason or _no_candidate(net, site.path))


def _no_candidate(net: nn.Module, path: str) -> str:
    module = net.get_submodule(path)
    if _is_layer(module):
        return f"no {type(module).__name__} takes the outputs of '{path}' as its inputs"
    if any(type(inner).__name__ == "Conv1D" for inner in module.modules()):
        return f"'{path}' has layers of the class Conv1D of transformers; only Linear and Conv2d are widened"
    return (
        f"'{path}' has no layer of the class Linear, or Conv2d without groups, that takes the outputs of"
        " another one as its inputs"
    )


def _candidates(net: nn.Module, path: str, calls: Sequence[Call]) -> Iterator[Pair]:
    """Return the pairs that the shapes of the recorded calls suggest, the most likely first."""
    paths = [each.path for each in calls]
    layers: list[tuple[int, Call, Layer]] = []
    for index, each in enumerate(calls):
        module: Any = net.get_submodule(each.path)
        if _is_layer(module) and paths.count(each.path) == 1 and each.args:
            layers.append((index, each, module))
    is_block = not _is_layer(net.get_submodule(path))
    for position in reversed(range(len(layers))) if is_block else range(len(layers)):
        end, last, second = layers[position]
        before = [each for each in layers[:position] if _feeds(each[2], second)]
        if not before:
            continue
        groups = [before[-1:]]
        if len(before) > 1 and _have_same_input(*before[-2:]):
            groups.insert(0, before[-2:])
        for group in groups:
            names = tuple(each.path for _, each, _ in group)
            inside = all(name.startswith(f"{path}.") for name in (*names, last.path))
            if inside if is_block else path in names:
                start, one, _ = group[0]
                between = tuple(p for p in paths[start:end] if p not in names)
                norm = _norm_of(net, calls[start:end], group[-1][1].output)
                shapes = tuple(one.args[0].shape), tuple(last.args[0].shape)
                yield Pair(names, norm, last.path, between, *shapes)


def _have_same_input(one: tuple[int, Call, Layer], other: tuple[int, Call, Layer]) -> bool:
    """Return whether two layers of the same size were called with the same tensor."""
    is_same_size = type(one[2]) is type(other[2]) and len(one[2].weight) == len(other[2].weight)
    return is_same_size and one[1].args[0] is other[1].args[0]


def _is_layer(module: nn.Module) -> bool:
    return type(module) is nn.Linear or (type(module) is nn.Conv2d and module.groups == 1)


def _feeds(first: Layer, second: Layer) -> bool:
    """Return whether ``first`` has as many outputs as ``second`` has inputs."""
    return type(first) is type(second) and first.weight.shape[0] == second.weight.shape[1]


def _norm_of(net: nn.Module, calls: Sequence[Call], units: Tensor) -> str | None:
    """Return the path of the batch normalisation that was called with the hidden units."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d)
    found = (c.path for c in calls if c.args and c.args[0] is units)
    return next((path for path in found if type(net.get_submodule(path)) in kinds), None)


def _check_weights(net: nn.Module, pair: Pair) -> None:
    """Raise _NoPairError if a weight of the pair is shared with another module, quantised or computed."""
    everywhere = [id(p) for _, p in net.named_parameters(remove_duplicate=False)]
    for path in (*pair.first, *(() if pair.norm is None else (pair.norm,)), pair.second):
        layer = net.get_submodule(path)
        weight: Any = layer.weight
        if weight is not None and (type(weight) is not nn.Parameter or type(weight.data) is not Tensor):
            raise _NoPairError(
                f"the weight of '{path}' is a {type(weight.data).__name__}, not a plain parameter"
            )
        for name, parameter in layer.named_parameters(recurse=False):
            if not parameter.is_floating_point():
                raise _NoPairError(f"the {name} of '{path}' is quantised ({parameter.dtype})")
            if everywhere.count(id(parameter)) > 1:
                raise _NoPairError(f"the {name} of '{path}' is shared with another module")


def _try(net: nn.Module, site: Site, pair: Pair, wanted: list[Tensor], sample: Any) -> None:
    """Add units to the pair and run the network; raise _NoPairError unless the output changes if, and only
    if, the outgoing weights of the units are not zero. The network is unchanged afterwards."""
    layers = PairLayers.of(net, pair)
    where = f"hidden units between '{pair.first[0]}' and '{pair.second}'"
    with TorchStream(0):
        graft = WidthGraft(site, blueprint_named("widen", site.topology), Style.LINEAR_ADD, layers)
    handle = graft.attach(net, None, layers)
    graft.eval()
    try:
        same = _outputs(net, sample, where)
        if not are_equal(wanted, same):
            raise _NoPairError(
                f"new {where} change the output although their outgoing weights are zero: the network"
                " computes over all units, or selects units, between the two layers"
            )
        nn.init.constant_(graft.seed.outer.weight, 1.0)  # type: ignore[arg-type]  # a Linear or a Conv2d
        if are_equal(wanted, _outputs(net, sample, where)):
            raise _NoPairError(f"new {where} have no effect on the output")
    finally:
        handle.remove()


def _outputs(net: nn.Module, sample: Any, where: str) -> list[Tensor]:
    try:
        return tensors_in(dry_forward(net, sample)[1])
    except HostError as error:
        if not isinstance(error.__cause__, _SHAPE_ERRORS):
            raise
        cause = str(error.__cause__).partition("\n")[0]
        raise _NoPairError(f"the forward pass of the network fails with new {where}: {cause}") from None


# --- configurations of pretrained models --------------------------------------------------------------------


def _find_setting(net: nn.Module, pair: Pair) -> Setting | None:
    """Return the attribute of a configuration that states the number of hidden units of all blocks, proved by
    building the network from the changed configuration; None if there is none."""
    container = _container_of(net, pair)
    top = None if container is None else rebuildable(net, container)
    if container is None or top is None:
        return None
    parts = container.split(".")
    above = [".".join(parts[:end]) for end in range(len(parts) - 1, -1, -1)]
    owner = next(path for path in above if hasattr(net.get_submodule(path), "config"))
    config, first = net.get_submodule(owner).config, net.get_submodule(pair.first[0])
    hidden = len(first.get_parameter("weight"))
    wanted = _enlarged_shapes(
        net.get_submodule(top), container.removeprefix(f"{top}."), pair.inside(container)
    )
    for name, value in list(vars(config).items()):
        if not names_width(name) or not (value is None or (type(value) is int and value == hidden)):
            continue
        setattr(config, name, hidden + 1)
        try:
            found = _shapes(rebuilt(net.get_submodule(top)))
        finally:
            setattr(config, name, value)
        if found == wanted:
            return Setting(container, owner, name)
    return None


def _container_of(net: nn.Module, pair: Pair) -> str | None:
    """Return the path of the outermost list of blocks that contains the pair in one block."""
    parts = pair.second.split(".")
    for end in range(1, len(parts)):
        path = ".".join(parts[:end])
        block = f"{path}.{parts[end]}."
        is_list = isinstance(net.get_submodule(path), nn.ModuleList | nn.Sequential)
        if is_list and all(each.startswith(block) for each in (*pair.first, pair.second)):
            return path
    return None


def _shapes(net: nn.Module) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in net.state_dict().items()}


def _enlarged_shapes(net: nn.Module, container: str, pair: Pair) -> dict[str, list[int]]:
    """Return the shapes of all tensors of ``net`` after one hidden unit was added to the pair of every block;
    paths of ``pair`` start at a block."""
    shapes = _shapes(net)
    rows = [f"{path}.{name}" for path in (*pair.first, pair.norm) for name in _VECTORS]
    for number, _ in net.get_submodule(container).named_children():
        block = f"{container}.{number}"
        for name in rows:
            if f"{block}.{name}" in shapes:
                shapes[f"{block}.{name}"][0] += 1
        if f"{block}.{pair.second}.weight" in shapes:
            shapes[f"{block}.{pair.second}.weight"][1] += 1
    return shapes
