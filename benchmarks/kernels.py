"""What torch's kernels take on narrow feature maps, and what the ways of ``kasmina/layers.py`` take instead.

    python -m benchmarks.kernels

Batches of 64, ``channels_last``, one thread; CPU microseconds, the least of some iterations.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measuring import GEMM_FLOPS, cpu_times, gemm, gflops
from esper.kasmina import layers

BATCH, REPEATS = 64, 20
SHAPES = [(3, 8, 32), (8, 8, 32), (8, 16, 16), (16, 16, 16), (16, 32, 8), (32, 32, 8)]
"""Channels in and out, and the side of the map."""


def features(channels: int, side: int) -> Tensor:
    return torch.randn(BATCH, channels, side, side).contiguous(memory_format=torch.channels_last)


def convolution(channels: int, width: int, side: int) -> None:
    x, grad, bias = features(channels, side), features(width, side), torch.randn(width)
    weight = torch.randn(width, channels, 3, 3).contiguous(memory_format=torch.channels_last)
    turned = weight.flip(2, 3).transpose(0, 1)

    def gradients(*wanted: bool) -> tuple[Tensor, ...]:
        sizes = [width], (1, 1), (1, 1), (1, 1), False, (0, 0), 1
        found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(grad, x, weight, *sizes, wanted)
        return found

    def total() -> Tensor:
        return grad.sum(dim=(0, 2, 3))

    times = cpu_times(
        {
            "forward": lambda: F.conv2d(x, weight, bias, padding=1),
            "folded": lambda: layers._convolved(x, weight, bias, True),
            "to the input": lambda: gradients(True, False, False),
            "folded ": lambda: layers._convolved(grad, turned, None, True),
            "to the weight": lambda: gradients(False, True, False),
            "and the bias": lambda: gradients(False, True, True),
            "sum": total,
        },
        repeats=REPEATS,
    )
    rate = gflops(2 * BATCH * side**2 * 9 * channels * width, times["forward"])
    print(f"3×3, {channels} to {width} at {side}×{side}: {_row(times)}; forward {rate:.0f} GFLOP/s")
    exact = grad.double().sum(dim=(0, 2, 3))
    errors = [float((found - exact).abs().max()) for found in (gradients(False, True, True)[2], total())]
    print(f"    error of the bias gradient: oneDNN {errors[0]:.1e}, sum {errors[1]:.1e}")


@torch.no_grad()
def norm_and_pool(width: int, side: int) -> None:
    x, norm, pool = features(width, side), layers.NormReLU(width // 8, width), layers.MaxPool2d()
    times = cpu_times(
        {
            "GroupNorm and ReLU": lambda: F.relu(F.group_norm(x, width // 8, norm.weight, norm.bias)),
            "ours": lambda: norm(x),
            "max pooling": lambda: F.max_pool2d(x, 2),
            "ours ": lambda: pool(x),
        },
        repeats=REPEATS,
    )
    print(f"{width} channels at {side}×{side}: {_row(times)}")


def _row(times: dict[str, float]) -> str:
    return ", ".join(f"{name.strip()} {1000 * time:.0f}" for name, time in times.items()) + " µs"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"matrix product: {gflops(GEMM_FLOPS, cpu_times({'gemm': gemm}, repeats=1)['gemm']):.0f} GFLOP/s")
    for shape in SHAPES:
        convolution(*shape)
    for width, side in ((8, 32), (16, 16), (32, 8)):
        norm_and_pool(width, side)
