"""Layers that go their own way on large feature maps, against torch's own."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina import CNNHost
from esper.kasmina.blueprints.conv import ConvLight
from esper.kasmina.layers import LARGE, Conv2d, MaxPool2d, NormReLU, is_large
from esper.leyline import BlueprintAction, Stage
from esper.tolaria.flops import PartCost, count_part
from tests.tolaria.building import grown_model, set_stage, stir

BATCH, SIDE = 32, 32


def features(channels: int, batch: int = BATCH, side: int = SIDE) -> Tensor:
    generator = torch.Generator().manual_seed(channels)
    x = torch.randn(batch, channels, side, side, generator=generator)
    return x.contiguous(memory_format=torch.channels_last)


Call = Callable[[Any, Tensor], Tensor]


def compare(layer: nn.Module, x: Tensor, plain: Call, own: Call = lambda layer, x: layer(x)) -> None:
    """Output and all gradients of ``own`` in float against those of ``plain`` in double precision."""
    results = []
    for call, kind in ((own, torch.float32), (plain, torch.float64)):
        copied = copy.deepcopy(layer).to(kind)
        given = x.detach().to(kind).requires_grad_()
        output = call(copied, given)
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
        results.append([output.detach(), given.grad, *(p.grad for p in copied.parameters())])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(
            found.double(), wanted, rtol=0, atol=1e-4 * wanted.detach().abs().max().item()
        )
    with torch.inference_mode():
        torch.testing.assert_close(own(layer, x), results[0][0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("channels", "width", "kernel", "side"),
    [
        (3, 8, 3, 32),
        (8, 8, 3, 32),
        (8, 16, 3, 32),
        (16, 8, 5, 32),
        (8, 8, 1, 32),
        (8, 4, 3, 51),
        (20, 24, 3, 32),
    ],
)
def test_a_convolution_is_torchs(channels: int, width: int, kernel: int, side: int) -> None:
    layer = Conv2d(channels, width, kernel).to(memory_format=torch.channels_last)
    x = features(channels, side=side, batch=64)
    assert is_large(x, width)
    compare(layer, x, lambda layer, x: F.conv2d(x, layer.weight, layer.bias, padding=kernel // 2))


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


@pytest.mark.parametrize(
    ("width", "groups", "side"), [(8, 1, 32), (8, 1, 33), (6, 1, 40), (16, 2, 32), (100, 1, 20)]
)
def test_normalisation_and_relu_are_torchs(width: int, groups: int, side: int) -> None:
    layer, x = NormReLU(groups, width), features(width, side=side, batch=64)
    stir(layer)
    assert is_large(x)
    compare(layer, x, lambda layer, x: F.relu(F.group_norm(x, groups, layer.weight, layer.bias)))


@pytest.mark.parametrize(("width", "side"), [(8, 32), (8, 33), (4, 64), (16, 32)])
def test_pooling_is_torchs(width: int, side: int) -> None:
    layer, x = MaxPool2d(), features(width, side=side)
    compare(layer, x, lambda _, x: F.max_pool2d(x, 2))


def test_small_maps_other_layouts_and_autocast_take_torchs_way_bit_for_bit() -> None:
    conv, norm = Conv2d(8, 8, 3), NormReLU(1, 8)
    for x in (features(8, batch=2), features(8).contiguous(), features(8).double()):
        conv, norm = conv.to(x.dtype), norm.to(x.dtype)
        assert not is_large(x)
        assert torch.equal(conv(x), F.conv2d(x, conv.weight, conv.bias, padding=1))
        assert torch.equal(norm(x), F.relu(F.group_norm(x, 1, norm.weight, norm.bias)))
        assert torch.equal(MaxPool2d()(x), F.max_pool2d(x, 2))
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_large(features(8))


def test_a_light_seed_is_added_to_the_features_by_one_convolution() -> None:
    seed, alpha = ConvLight(8).to(memory_format=torch.channels_last), torch.tensor(0.7)
    x = features(8)
    assert torch.equal(seed.added(x, alpha), x), "at birth it changes no bit"
    stir(seed)
    compare(seed, x, lambda seed, x: x + alpha.double() * seed(x), lambda seed, x: seed.added(x, alpha))


def test_a_model_with_a_light_seed_takes_the_short_way_and_counts_the_long_one() -> None:
    host = CNNHost((8,), kernel=3, input_shape=(3, SIDE, SIDE), classes=4)
    model, _ = grown_model({0: BlueprintAction.CONV_LIGHT}, host=host)
    set_stage(model, 0, Stage.BLENDING, alpha=0.5)
    x = features(3)
    h = host.segments[0](x)
    by_hand = host.segments[1](h + 0.5 * model.slot(0).seed(h))
    torch.testing.assert_close(model(x), by_hand, rtol=1e-4, atol=1e-5)
    # A 3×3 convolution of 8 channels on 256×256: 2·65536·9·8·8. Of two in a row each has as many for its
    # input and for its weights; the second is handed features in the layout that could be folded.
    flops = 2 * 65536 * 9 * 64
    assert LARGE <= 2 * 8 * 65536, "two samples are counted"
    part = nn.Sequential(Conv2d(8, 8, 3), Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)
    assert count_part(part, (8, 256, 256)) == PartCost(2 * flops, 4 * flops, 3 * flops, 2 * flops)
