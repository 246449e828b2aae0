"""Layers that take Esper's own kernels on large feature maps, against torch's own."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina import CNNHost
from esper.kasmina.blueprints.conv import ConvLight
from esper.kasmina.layers import Conv2d, ConvBlock
from esper.kasmina.native import LARGE, kernels, takes
from esper.leyline import BlueprintAction, Stage
from esper.tolaria.flops import PartCost, count_part
from tests.tolaria.building import grown_model, set_stage, stir

pytestmark = pytest.mark.skipif(kernels().library is None, reason=kernels().description)

BATCH, SIDE = 32, 32


def features(channels: int, batch: int | None = BATCH, height: int = SIDE, width: int = SIDE) -> Tensor:
    """``batch`` of None: as many samples as the kernels want to see."""
    batch = -(-LARGE // (channels * height * width)) if batch is None else batch
    generator = torch.Generator().manual_seed(channels)
    x = torch.randn(batch, channels, height, width, generator=generator)
    return x.contiguous(memory_format=torch.channels_last)


Call = Callable[[Any, Tensor], Tensor]


def compare(layer: nn.Module, x: Tensor, own: Call, plain: Call) -> None:
    """Output and all gradients of ``own`` in float against those of ``plain`` in double precision."""
    results = []
    clear = None
    for call, kind in ((plain, torch.float64), (own, torch.float32)):
        copied = copy.deepcopy(layer).to(kind)
        given = x.detach().to(kind).requires_grad_()
        output = call(copied, given)
        if clear is None:  # where a ReLU is near its corner, rounding decides whether a gradient passes
            clear = output.detach().abs() > 1e-4
        (output * clear * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
        results.append([output.detach(), given.grad, *(p.grad for p in copied.parameters())])
    for wanted, found in zip(*results, strict=True):
        error = (found.double() - wanted).abs().max() / wanted.abs().max()
        assert error < 2e-5, error
    with torch.inference_mode():
        assert torch.equal(own(layer, x), results[1][0]), "nothing but what is kept for backward differs"


def plainly(layer: nn.Module, x: Tensor) -> Tensor:
    """By torch's operators: in double precision the kernels are not taken."""
    assert not takes(x)
    output: Tensor = layer(x)
    return output


def natively(layer: nn.Module, x: Tensor) -> Tensor:
    assert takes(x, kernel=7)
    output: Tensor = layer(x)
    return output


@pytest.mark.parametrize(
    ("channels", "width", "kernel", "sides"),
    [
        (3, 8, 3, (64, 64)),
        (8, 8, 3, (32, 32)),
        (8, 16, 1, (32, 32)),
        (16, 32, 3, (16, 32)),
        (16, 8, 5, (20, 32)),
        (32, 16, 7, (16, 16)),
        (32, 28, 3, (8, 24)),
        (8, 4, 3, (51, 37)),
        (20, 24, 3, (13, 40)),
        (1, 9, 3, (200, 201)),
        (30, 3, 3, (9, 5)),
    ],
)
def test_a_convolution_is_torchs(channels: int, width: int, kernel: int, sides: tuple[int, int]) -> None:
    layer = Conv2d(channels, width, kernel).to(memory_format=torch.channels_last)
    compare(layer, features(channels, None, *sides), natively, plainly)


@pytest.mark.parametrize("pools", [False, True])
@pytest.mark.parametrize(
    ("channels", "width", "groups", "sides"),
    [
        (3, 8, 1, (32, 32)),
        (8, 16, 2, (32, 32)),
        (16, 32, 4, (16, 16)),
        (16, 12, 1, (34, 48)),
        (8, 24, 3, (18, 16)),
        (8, 8, 2, (33, 30)),
    ],
)
def test_a_block_is_torchs(
    channels: int, width: int, groups: int, sides: tuple[int, int], pools: bool
) -> None:
    """The last two cannot be pooled by the kernels: an odd height, and a width that is no multiple of 16."""
    layer = ConvBlock(Conv2d(channels, width, 3), groups, pools=pools).to(memory_format=torch.channels_last)
    stir(layer)
    compare(layer, features(channels, None, *sides), natively, plainly)


def test_weights_may_lie_in_memory_as_they_like() -> None:
    layer, x = Conv2d(8, 8, 3), features(8)
    compare(layer, x, natively, plainly)
    layer.weight = nn.Parameter(layer.weight.detach().transpose(2, 3).contiguous().transpose(2, 3))
    compare(layer, x, natively, plainly)


def test_of_equal_inputs_the_first_gets_the_gradient_of_the_largest() -> None:
    layer = ConvBlock(Conv2d(8, 8, 1), 1, pools=True)
    x = features(8).clamp(min=0.5)  # in two thirds of all squares several are 0.5
    gradients = []
    for kind in (torch.float32, torch.float64):
        given = x.detach().clone().to(kind).requires_grad_()
        layer.to(kind)(given).square().sum().backward()
        gradients.append(given.grad != 0)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_number_that_is_not_finite_is_not_lost(value: float, place: tuple[int, int]) -> None:
    layer = ConvBlock(Conv2d(8, 8, 3), 1, pools=True).to(memory_format=torch.channels_last)
    x = features(8)
    x[1, 2, place[0], place[1]] = value
    output = layer(x)
    assert output[1].isnan().all(), "the statistics of its group are not finite"
    assert output[[0, *range(2, BATCH)]].isfinite().all()
    output.sum().backward()
    assert layer[1].weight.grad.isnan().any()


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_convolution_without_some_gradients(frozen: str) -> None:
    layer = Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
    getattr(layer, frozen).requires_grad_(False)
    layer(features(8)).sum().backward()
    assert getattr(layer, frozen).grad is None
    # Every output counts once, so a bias has a gradient of 32·32·32 positions; a weight one of the inputs.
    if frozen == "weight":
        assert layer.bias.grad.tolist() == [BATCH * SIDE * SIDE] * 8
    else:
        sums = features(8).sum(dim=(0, 2, 3))
        torch.testing.assert_close(layer.weight.grad[0, :, 1, 1], sums, rtol=1e-4, atol=1e-3)


def test_a_sample_is_the_same_in_any_batch() -> None:
    layer = ConvBlock(Conv2d(8, 16, 3), 2, pools=True).to(memory_format=torch.channels_last)
    x = features(8, 64)
    assert torch.equal(layer(x)[32:], layer(x[32:]))


def test_small_maps_other_layouts_threads_and_autocast_take_torchs_way_bit_for_bit() -> None:
    conv, block = Conv2d(8, 8, 3), ConvBlock(Conv2d(8, 8, 3), 1, pools=True)

    def is_torchs(x: Tensor) -> bool:
        by_hand = F.conv2d(F.max_pool2d(x, 2), block[1].weight, block[1].bias, padding=1)
        by_hand = F.relu(F.group_norm(by_hand, 1, block[2].weight, block[2].bias))
        return torch.equal(conv(x), F.conv2d(x, conv.weight, conv.bias, padding=1)) and torch.equal(
            block(x), by_hand
        )

    assert takes(features(8))
    assert not takes(features(33))
    for x in (features(8, batch=2), features(8).contiguous(), features(8).double()):
        conv, block = conv.to(x.dtype), block.to(x.dtype)
        assert not takes(x)
        assert is_torchs(x)
    conv, block = conv.float(), block.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert not takes(features(8))
    torch.set_num_threads(2)
    try:
        assert not takes(features(8))
        assert is_torchs(features(8))
    finally:
        torch.set_num_threads(1)


def test_a_light_seed_is_added_to_the_features_by_one_kernel() -> None:
    seed, alpha = ConvLight(8).to(memory_format=torch.channels_last), torch.tensor(0.7)
    x = features(8)
    assert torch.equal(seed.added(x, alpha), x), "at birth it changes no bit"
    stir(seed)
    compare(
        seed, x, lambda seed, x: seed.added(x, alpha), lambda seed, x: x + alpha.double() * plainly(seed, x)
    )


def test_a_model_with_a_light_seed_takes_the_short_way_and_counts_the_long_one() -> None:
    host = CNNHost((8,), kernel=3, input_shape=(3, SIDE, SIDE), classes=4)
    model, _ = grown_model({0: BlueprintAction.CONV_LIGHT}, host=host)
    set_stage(model, 0, Stage.BLENDING, alpha=0.5)
    x = features(3)
    h = host.segments[0](x)
    by_hand = host.segments[1](h + 0.5 * model.slot(0).seed(h))
    torch.testing.assert_close(model(x), by_hand, rtol=1e-4, atol=1e-5)
    # A 3×3 convolution of 8 channels on 256×256: 2·65536·9·8·8. Of two in a row each has as many for its
    # input and for its weights; the second is handed features that the kernels would take.
    flops = 2 * 65536 * 9 * 64
    assert LARGE <= 2 * 8 * 65536, "two samples are counted"
    part = nn.Sequential(Conv2d(8, 8, 3), Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)
    assert count_part(part, (8, 256, 256)) == PartCost(2 * flops, 4 * flops, 3 * flops, 2 * flops)
