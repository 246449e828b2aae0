"""Low-rank seeds: their rank, and how the rank is raised in the middle of training.

A low-rank seed is a ``Mirrored`` of two linear layers without bias. The additional rank starts as it does in
a new seed: the two branches cancel, so the output of the network does not change except for rounding, and
every new weight gets a gradient in the first backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import Mirrored
from esper.kasmina.blueprints.tokens import low_rank
from esper.kasmina.graft import Graft
from esper.kasmina.seed_description import described, description_of
from esper.leyline.errors import BlueprintError

if TYPE_CHECKING:
    from esper.kasmina.network import MorphogeneticModel


class Branch(NamedTuple):
    """One of the two branches of a low-rank seed; it computes ``up(down(h))``."""

    down: nn.Linear
    up: nn.Linear


class Extension(NamedTuple):
    """Weights that raise the rank of one branch: further rows of ``down`` and further columns of ``up``."""

    down: Tensor
    up: Tensor


def branches_of(seed: nn.Module) -> list[Branch]:
    """Return the branches of a low-rank seed; an empty list for a seed of any other kind."""
    if type(seed) is not Mirrored:
        return []
    found = []
    for layers in (list(seed.one), list(seed.other)):
        linear = [layer for layer in layers if _is_plain(layer)]
        if len(layers) == len(linear) == 2:
            found.append(Branch(*linear))
    return found if len(found) == 2 else []


def _is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    return type(layer) is nn.Linear and [name for name, _ in layer.named_parameters()] == ["weight"]


def rank_of(seed: nn.Module) -> int:
    """Return the rank of a low-rank seed, which is the sum over its branches; 0 for a seed of any other
    kind."""
    return sum(branch.down.out_features for branch in branches_of(seed))


def raise_rank(network: MorphogeneticModel, slot: int, rank: int) -> None:
    """Raise the rank of the seed in ``slot`` of a network, with its optimiser state, and in all copies of the
    network.

    Parameters remain the same objects. The caller checks ``rank`` and updates the slot table.
    """
    place = network.slots[slot]
    graft, groups = place.held, network.groups
    before = {parameter: parameter.shape for parameter in graft.seed.parameters()}
    with place.draws():
        extend(graft, new_extensions(graft.seed, rank))
    for parameter, shape in before.items():
        if groups is not None:
            groups.extend_moments(parameter, shape)
    for follower in network.followers:
        follower.rank_raised(slot, graft)


def new_extensions(seed: nn.Module, rank: int) -> list[Extension]:
    """Return random weights that raise the rank of a low-rank seed to ``rank`` without an effect on its
    output."""
    branches = branches_of(seed)
    if not branches:
        raise BlueprintError(f"a seed of class {type(seed).__name__} cannot have a rank of {rank}")
    return extensions_beyond(low_rank(branches[0].down.in_features, rank), rank_of(seed))


def extensions_beyond(seed: nn.Module, rank: int) -> list[Extension]:
    """Return the weights of a low-rank seed that a seed of the lower rank ``rank`` does not have."""
    start = rank // 2
    return [
        Extension(branch.down.weight.detach()[start:], branch.up.weight.detach()[:, start:])
        for branch in branches_of(seed)
    ]


def extend(graft: Graft, extensions: Sequence[Extension]) -> None:
    """Append weights to a low-rank seed, and store the new rank in the description of the graft.

    Gradients that are present are extended by zeros.
    """
    for branch, extension in zip(branches_of(graft.seed), extensions, strict=True):
        _append(branch.down.weight, extension.down, 0)
        _append(branch.up.weight, extension.up, 1)
        branch.down.out_features = branch.up.in_features = len(branch.down.weight)
    blueprint, style = described(graft.description)
    description = description_of(blueprint, style, rank_of(graft.seed))
    graft.description = description.to(graft.description.device)


def _append(weight: Tensor, new: Tensor, axis: int) -> None:
    added = new.to(weight)
    gradient = None if weight.grad is None else torch.cat([weight.grad, torch.zeros_like(added)], axis)
    replace_data(weight, torch.cat([weight.detach(), added], axis), gradient)


def replace_data(parameter: Tensor, data: Tensor, gradient: Tensor | None) -> None:
    """Replace data and gradient of a parameter by tensors of another shape.

    As long as a loss of an earlier step exists, torch keeps a node of its graph that accepts only gradients
    of the old shape. Torch drops this node when the dtype of the data changes, so the parameter has another
    dtype for a moment.
    """
    other = torch.float64 if parameter.dtype != torch.float64 else torch.float32
    parameter.grad = None
    parameter.data = torch.empty(0, dtype=other, device=parameter.device)
    parameter.data = data
    parameter.grad = gradient


def undo_of(seed: nn.Module) -> Callable[[], None]:
    """Return a function that restores the present shapes, weights and gradients of a low-rank seed."""
    branches = branches_of(seed)
    before = [(weight, weight.data, weight.grad) for weight in seed.parameters()]
    sizes = [branch.down.out_features for branch in branches]

    def undo() -> None:
        for weight, data, gradient in before:
            replace_data(weight, data, gradient)
        for branch, size in zip(branches, sizes, strict=True):
            branch.down.out_features = branch.up.in_features = size

    return undo
