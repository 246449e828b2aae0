"""Renewal of trained blocks: their matrices are mixed with fresh initial values when the network grows.

A block that is added to a trained network often yields less than in a network that had it from the start.
Shrinking the trained weights and perturbing them by fresh initial values (Ash & Adams 2020) makes the trained
blocks adapt to the new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from esper.kasmina.optimizer_groups import SEED_NAME
from esper.kasmina.slot import without_slots
from esper.leyline import BlueprintError


def renew_blocks(net: nn.Module, source: nn.Module, factor: float, *, new: nn.Module) -> None:
    """Renew all blocks of the network that have the class and the parameter shapes of ``source``, except the
    block ``new``; see ``renew``."""
    shapes = _shapes(source)
    blocks = [m for m in net.modules() if type(m) is type(source) and _shapes(m) == shapes]
    renew([block for block in blocks if block is not new], factor)


def _shapes(block: nn.Module) -> list[torch.Size]:
    return [parameter.shape for _, parameter in _own_parameters(block)]


def _own_parameters(block: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a block that belong to no seed in it."""
    return ((n, p) for n, p in block.named_parameters() if SEED_NAME not in n.split("."))


@torch.no_grad()
def renew(modules: Iterable[nn.Module], factor: float) -> None:
    """Replace all matrices and kernels by ``factor`` · trained values + (1 − ``factor``) · fresh initial
    values.

    Fresh values are those of ``reset_parameters`` of a module, or else of its children; they are drawn from
    torch's global generator. Parameters without such a method, and biases and scales, do not change.

    Args:
        modules: Modules to renew; seeds in them are left out.
        factor: Share of the trained values, from 0 to 1.

    Raises:
        BlueprintError: ``factor`` is not between 0 and 1, or no matrix has a method for fresh values; no
            parameter has changed.
    """
    if not 0.0 <= factor <= 1.0:
        raise BlueprintError(f"renew is {factor}; choose a factor from 0 to 1, where 1 changes nothing")
    parameters, values = list[Tensor](), list[Tensor]()
    for module in modules:
        fresh = without_slots(module)
        _reset(fresh)
        initial = dict(fresh.named_parameters())
        for name, parameter in _own_parameters(module):
            if parameter.ndim > 1 and not torch.equal(initial[name], parameter):
                parameters.append(parameter)
                values.append(torch.lerp(initial[name], parameter, factor))
    if not parameters:
        raise BlueprintError(
            "no matrix of the network's blocks can get fresh initial values; give their class a method"
            " reset_parameters(), or leave renew at 1"
        )
    torch._foreach_copy_(parameters, values)


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        reset()
        return
    for child in module.children():
        _reset(child)
