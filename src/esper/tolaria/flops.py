"""Counted compute: multiplications and additions of convolutions and matrix products.

Every part (segment, seed) is counted once, per sample, by torch's counter while it really runs.
Normalisation, activations and pooling are not counted.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from esper.kasmina.streams import TorchStream

_BATCH = 2


def flop_counter() -> FlopCounterMode:
    """Torch's counter, right about grouped convolutions and about attention on the CPU as well."""
    aten = torch.ops.aten
    formulas = {
        aten.convolution_backward: _convolution_backward,
        aten._scaled_dot_product_flash_attention_for_cpu: _of_first(3, sdpa_flop_count),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _of_first(4, sdpa_backward_flop_count),
    }
    return FlopCounterMode(display=False, custom_mapping=formulas)


def _convolution_backward(
    grad_output: Sequence[int], x: Sequence[int], weight: Sequence[int], *settings: Any, **_: Any
) -> int:
    """The gradients of input and weight each cost one forward; arguments are the operator's, as shapes.

    ``weight [out, in / groups, …]`` already has the groups in it. Torch's own formula takes every
    pair of input and output channels for the weight gradient: ``groups`` times too much.
    """
    *_before, transposed, _output_padding, _groups, wanted = settings
    positions = math.prod((x if transposed else grad_output)[2:])
    return sum(wanted[:2]) * 2 * x[0] * positions * math.prod(weight)


def _of_first(shapes: int, formula: Callable[..., int]) -> Callable[..., int]:
    """Torch's formula for attention, which torch applies on CUDA only; a causal one is charged in full."""
    return lambda *arguments, **_: int(formula(*arguments[:shapes]))


class PartCost(NamedTuple):
    """FLOPs per sample of one part of the network."""

    forward: int
    to_all: int
    """Backward into parameters and input."""
    to_parameters: int
    """Backward into parameters only: the input needs no gradient."""
    to_input: int
    """Backward into the input only: the parameters are frozen."""


_counted: dict[tuple[str, tuple[int, ...], tuple[torch.Size, ...]], PartCost] = {}


def count_part(part: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> PartCost:
    """FLOPs of one part on a sample of ``shape``; parts that read alike are counted once per process."""
    key = (f"{type(part).__module__}.{part!r}", shape, tuple(p.shape for p in part.parameters()))
    if key not in _counted:
        _counted[key] = _count(part, shape, dtype)
    return _counted[key]


def _count(part: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> PartCost:
    """Count on a copy: running a part may change its statistics."""
    part = copy.deepcopy(part).cpu()
    parameters = [p for p in part.parameters() if p.requires_grad]

    def count(into_parameters: bool, into_input: bool) -> tuple[int, int]:
        into_input &= dtype.is_floating_point
        for parameter in parameters:
            parameter.requires_grad_(into_parameters)
        sample = torch.ones((_BATCH, *shape), dtype=dtype, requires_grad=into_input)
        wanted: list[Tensor] = parameters * into_parameters + [sample] * into_input
        with flop_counter() as forward, torch.enable_grad():
            output = part(sample)
        if not wanted or not output.requires_grad:
            return int(forward.get_total_flops()) // _BATCH, 0
        with flop_counter() as backward:
            torch.autograd.grad(output.sum(), wanted, allow_unused=True)
        return int(forward.get_total_flops()) // _BATCH, int(backward.get_total_flops()) // _BATCH

    with TorchStream(0):  # dropout in the part must not cost anybody a draw
        forward, to_all = count(True, True)
        return PartCost(forward, to_all, count(True, False)[1], count(False, True)[1])
