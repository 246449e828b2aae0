"""What a block of a narrow CNN takes by torch's kernels and by Esper's own (``kasmina/conv_block.c``).

    python -m benchmarks.kernels

Batches of 64, ``channels_last``, one thread; CPU microseconds, the least of some iterations. The rate counts
the multiplications and additions of the convolution alone.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.measuring import GEMM_FLOPS, cpu_times, gemm, gflops
from esper.kasmina import native
from esper.kasmina.layers import Conv2d, ConvBlock

BATCH, REPEATS = 64, 10
SHAPES = [(3, 8, 32, False), (8, 8, 32, False), (8, 16, 32, True), (16, 16, 16, False), (16, 32, 16, True)]
"""Channels in and out, the side of the map, and whether it is pooled first."""


class Plain(nn.Module):
    """The same layers by torch."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        parts = copy.deepcopy(block) if isinstance(block, ConvBlock) else [copy.deepcopy(block)]
        self.parts = nn.Sequential(*parts)
        for part in self.parts:
            if isinstance(part, Conv2d):
                part.__class__ = nn.Conv2d

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.parts(x)
        return output


def features(channels: int, side: int) -> Tensor:
    return torch.randn(BATCH, channels, side, side).contiguous(memory_format=torch.channels_last)


def compare(name: str, own: nn.Module, x: Tensor, flops: int) -> None:
    own.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stubs
    plain = Plain(own)
    grad = torch.randn_like(own(x))
    given = x.detach().requires_grad_(x.shape[1] > 3)

    def forward(module: nn.Module) -> Callable[[], None]:
        def run() -> None:
            with torch.inference_mode():
                module(x)

        return run

    def both(module: nn.Module) -> Callable[[], None]:
        wanted = [*module.parameters(), *([given] if given.requires_grad else [])]
        return lambda: (torch.autograd.grad(module(given), wanted, grad), None)[1]

    calls = {"torch forward": forward(plain), "Esper forward": forward(own)}
    calls |= {"torch both": both(plain), "Esper both": both(own)}
    times = cpu_times(calls, repeats=REPEATS)
    rows = (f"{called} {1000 * time:.0f} µs" for called, time in times.items())
    rates = (gflops(flops, times[f"{whose} forward"]) for whose in ("torch", "Esper"))
    print(f"{name}: {', '.join(rows)}; forward {' and '.join(f'{rate:.0f}' for rate in rates)} GFLOP/s")


def main() -> None:
    torch.set_num_threads(1)
    print(f"kernels: {native.kernels().description}")
    print(f"matrix product: {gflops(GEMM_FLOPS, cpu_times({'gemm': gemm}, repeats=1)['gemm']):.0f} GFLOP/s")
    for channels, width, side, pools in SHAPES:
        flops = 2 * BATCH * (side // (2 if pools else 1)) ** 2 * 9 * channels * width
        x, named = features(channels, side), f"{channels} to {width} channels at {side}×{side}"
        compare(f"convolution, {named}", Conv2d(channels, width, 3), x, flops * (4 if pools else 1))
        block = ConvBlock(Conv2d(channels, width, 3), width // 8, pools=pools)
        compare(f"{'pooled ' if pools else ''}block, {named}", block, x, flops)


if __name__ == "__main__":
    main()
