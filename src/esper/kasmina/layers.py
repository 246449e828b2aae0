"""Convolutions that take Esper's own kernels on large feature maps; anywhere else they are torch's own."""

import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina import native


class Conv2d(nn.Conv2d):
    """A convolution with an odd square kernel that keeps the size."""

    def __init__(self, channels: int, width: int, kernel: int) -> None:
        super().__init__(channels, width, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolve(x, self.weight, self.bias)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same with other weights of the same shape."""
        if native.takes(x, self.out_channels, self.kernel_size[0]):
            return native.conv_block(x, weight, bias, None, pools=False)
        return F.conv2d(x, weight, bias, padding=self.padding)


class ConvBlock(nn.Sequential):
    """Convolution, GroupNorm and ReLU, behind a 2×2 max pooling if it ``pools``; one kernel if it can be."""

    def __init__(self, convolution: Conv2d, groups: int, *, pools: bool) -> None:
        norm = nn.GroupNorm(groups, convolution.out_channels)
        pool = [nn.MaxPool2d(2)] if pools else []
        super().__init__(*pool, convolution, norm, nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        *pool, convolution, norm, _ = self
        assert isinstance(convolution, Conv2d)
        assert isinstance(norm, nn.GroupNorm)
        if not native.takes(x, convolution.out_channels, convolution.kernel_size[0]):
            output: Tensor = super().forward(x)
            return output
        pools = bool(pool)
        if pools and (x.shape[2] % 2 or x.shape[3] % native.POOLED_MULTIPLE):
            x, pools = pool[0](x), False
        settings = native.Norm(norm.num_groups, norm.weight, norm.bias, norm.eps)
        return native.conv_block(x, convolution.weight, convolution.bias, settings, pools=pools)
