"""Convolution, normalisation and pooling as a CPU runs them fastest on large feature maps of few channels.

Torch's kernels take the channels of one position at a time, so a narrow feature map leaves most of a vector
register empty. In ``channels_last`` the neighbours in a row lie side by side in memory: seen as one position
with twice the channels they fill it, without a copy. What is computed is the same up to rounding. Anywhere
else (small, on another device, in another layout or type, under autocast) these layers are torch's own.
"""

import math
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LANES: Final = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
"""Floats in a vector register."""
LARGE: Final = 2**18
"""Values of a feature map from which on a layer earns its own way through Python."""
NORM_CHANNELS: Final = 64
"""Channels that a normalisation gets by folding; it gets no faster with more."""


def is_large(x: Tensor, channels: int | None = None) -> bool:
    """Whether features like ``x``, of as many ``channels``, are such that a layer goes its own way."""
    return (
        x.numel() * (channels or x.shape[1]) >= LARGE * x.shape[1]
        and x.is_cpu
        and x.dtype is torch.float32
        and x.is_contiguous(memory_format=torch.channels_last)
        and not torch.is_autocast_enabled("cpu")
    )


def _folded(x: Tensor, count: int) -> Tensor:
    """``count`` neighbours of a row as one position: ``[N, C, H, W]`` to ``[N, count·C, H, W / count]``."""
    batch, channels, height, width = x.shape
    rows = x.permute(0, 2, 3, 1).view(batch, height, width // count, count * channels)
    return rows.permute(0, 3, 1, 2)


def _unfolded(x: Tensor, count: int) -> Tensor:
    """The inverse of ``_folded``."""
    batch, channels, height, width = x.shape
    rows = x.permute(0, 2, 3, 1).view(batch, height, width * count, channels // count)
    return rows.permute(0, 3, 1, 2)


# --- convolution -----------------------------------------------------------------------------------


class Conv2d(nn.Conv2d):
    """A convolution with an odd square kernel that keeps the size."""

    folds = True
    """Off where operations are counted: a wider convolution multiplies with zeros too."""

    def __init__(self, channels: int, width: int, kernel: int) -> None:
        super().__init__(channels, width, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolve(x, self.weight, self.bias)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same with other weights of the same shape."""
        if not is_large(x, weight.shape[0]):
            return F.conv2d(x, weight, bias, padding=self.padding)
        if not torch.is_grad_enabled():
            return _convolved(x, weight, bias, self.folds)
        output: Tensor = _Convolution.apply(x, weight, bias, self.folds)  # type: ignore[no-untyped-call]
        return output


class _Convolution(torch.autograd.Function):
    """The bias gradient is a plain sum: oneDNN's takes as long as a third of the weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, folds: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.folds = folds
        return _convolved(x, weight, bias, folds)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        to_x, to_weight, to_bias, _ = ctx.needs_input_grad
        x_gradient = weight_gradient = None
        if to_x and ctx.folds and _is_narrow(grad, weight.shape[1], weight.shape[3]):
            x_gradient = _convolved(grad, weight.flip(2, 3).transpose(0, 1), None, True)
            to_x = False
        if to_weight and ctx.folds and _is_narrow(x, weight.shape[0], weight.shape[3]):
            wide = _gradients(_folded(grad, 2), x, _widened(weight), 2, False, True)[1]
            left, right = wide.chunk(2)
            weight_gradient = left[..., :-1] + right[..., 1:]
            to_weight = False
        if to_x or to_weight:
            found = _gradients(grad, x, weight, 1, to_x, to_weight)
            x_gradient = found[0] if to_x else x_gradient
            weight_gradient = found[1] if to_weight else weight_gradient
        return x_gradient, weight_gradient, grad.sum(dim=(0, 2, 3)) if to_bias else None, None


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, folds: bool) -> Tensor:
    padding = weight.shape[2] // 2
    if not (folds and _is_narrow(x, weight.shape[0], weight.shape[3])):
        return F.conv2d(x, weight, bias, padding=padding)
    bias = None if bias is None else torch.cat((bias, bias))
    return _unfolded(F.conv2d(x, _widened(weight), bias, stride=(1, 2), padding=padding), 2)


def _is_narrow(x: Tensor, channels: int, kernel: int) -> bool:
    """Whether ``channels`` outputs of two neighbours fit a vector register, and the kernel reaches both."""
    return 2 * channels <= LANES and kernel > 1 and x.shape[3] % 2 == 0


def _widened(weight: Tensor) -> Tensor:
    """The kernel of two neighbouring outputs at once: ``[O, I, K, K]`` to ``[2·O, I, K, K + 1]``."""
    return torch.cat((F.pad(weight, (0, 1)), F.pad(weight, (1, 0))))


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, stride: int, to_x: bool, to_weight: bool
) -> tuple[Tensor, ...]:
    padding = weight.shape[2] // 2
    gradients: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        grad,
        x,
        weight,
        None,
        (1, stride),
        (padding, padding),
        (1, 1),
        False,
        (0, 0),
        1,
        (to_x, to_weight, False),
    )
    return gradients


# --- normalisation ---------------------------------------------------------------------------------


class NormReLU(nn.GroupNorm):
    """GroupNorm, then ReLU in its place.

    To the statistics of a single group it does not matter which position a value belongs to: neighbours
    are folded.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.num_groups > 1 or not is_large(x):
            return F.relu_(super().forward(x))
        output: Tensor = _NormReLU.apply(x, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        return output


class _NormReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        batch, channels, height, width = x.shape
        count = math.gcd(width, max(NORM_CHANNELS // channels, 1))
        sizes = batch, count * channels, height * width // count
        normalised, mean, rstd = torch.native_group_norm(
            _folded(x, count), weight.repeat(count), bias.repeat(count), *sizes, 1, eps
        )
        output = _unfolded(normalised.relu_(), count)
        ctx.save_for_backward(x, weight, mean, rstd, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd, output = ctx.saved_tensors
        batch, channels, height, width = x.shape
        grad = grad.contiguous(memory_format=torch.channels_last)
        rectified = torch.ops.aten.threshold_backward(grad, output, 0.0)
        # All three, wanted or not: without the input's the kernel crashes (torch 2.13).
        gradients: tuple[Tensor, ...] = torch.ops.aten.native_group_norm_backward(
            rectified, x, mean, rstd, weight, batch, channels, height * width, 1, (True, True, True)
        )
        return (*gradients, None)


# --- pooling ---------------------------------------------------------------------------------------


class MaxPool2d(nn.MaxPool2d):
    """The largest of every 2×2 positions; where nobody learns of two rows first, of two neighbours then."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.shape[-1] % 2 or x.shape[-2] % 2 or not is_large(x):
            output: Tensor = super().forward(x)
        else:
            output = torch.maximum(*_columns(torch.maximum(*_rows(x)))).permute(0, 3, 1, 2)
        return output


def _rows(x: Tensor) -> tuple[Tensor, ...]:
    """Every other row, from the first and from the second: ``[N, H / 2, W, C]`` each."""
    batch, channels, height, width = x.shape
    return x.permute(0, 2, 3, 1).view(batch, height // 2, 2, width, channels).unbind(2)


def _columns(rows: Tensor) -> tuple[Tensor, ...]:
    """Every other column, from the first and from the second: ``[N, H / 2, W / 2, C]`` each."""
    batch, height, width, channels = rows.shape
    return rows.view(batch, height, width // 2, 2, channels).unbind(3)
