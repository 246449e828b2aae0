"""Convolutions that take Esper's own kernels on large feature maps; anywhere else they are torch's own."""

from torch import Tensor, nn

from esper.kasmina import native


class Conv2d(nn.Conv2d):
    """A convolution with an odd square kernel that keeps the size."""

    def __init__(self, channels: int, width: int, kernel: int) -> None:
        super().__init__(channels, width, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        if native.takes(x, self.out_channels, self.kernel_size[0]):
            return native.conv_block(x, self.weight, self.bias)
        return super().forward(x)


class ConvBlock(nn.Sequential):
    """Convolution, GroupNorm and ReLU, behind a 2×2 max pooling if it ``pools``; one kernel if it can be."""

    def __init__(self, convolution: Conv2d, groups: int, *, pools: bool) -> None:
        norm = nn.GroupNorm(groups, convolution.out_channels)
        pool = [nn.MaxPool2d(2)] if pools else []
        super().__init__(*pool, convolution, norm, nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        pool, convolution, norm, _, *rest = self if isinstance(self[0], nn.MaxPool2d) else (None, *self)
        assert isinstance(convolution, Conv2d)
        assert isinstance(norm, nn.GroupNorm)
        if not native.takes(x, convolution.out_channels, convolution.kernel_size[0]):
            output: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
            return output
        if pool is not None and (x.shape[2] % 2 or x.shape[3] % native.POOLED_MULTIPLE):
            x, pool = pool(x), None
        settings = native.Norm(norm.num_groups, norm.weight, norm.bias, norm.eps)
        output = native.conv_block(
            x, convolution.weight, convolution.bias, norm=settings, pools=pool is not None
        )
        for layer in rest:  # somebody appended it
            output = layer(output)
        return output
