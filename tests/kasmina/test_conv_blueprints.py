"""Parameter counts and formulas of the blueprints for feature maps; the contract matrix tests other rules."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from esper.kasmina.blueprints import blueprint_named
from tests.contracts.matrix import restart


def build(name: str, width: int) -> nn.Module:
    restart(0)
    return blueprint_named(name, "feature_map").build(width)


@pytest.mark.parametrize(
    ("name", "at_32", "at_4"),
    [
        ("norm", 32, 4),
        # Parameters of attention at width 32: 2 · (32·4 + 4 + 4·32 + 32); at width 4, with 2 hidden units per
        # branch: 2 · (10 + 12).
        ("attention", 584, 44),
        # Parameters of bottleneck at width 32: 2 · (132 + 148 + 160); at width 4, with 4 hidden channels per
        # branch: 2 · (20 + 148 + 20).
        ("bottleneck", 880, 376),
        # Parameters of conv_small at width 32: 2 branches of 2 layers with 32·32 + 32 parameters.
        ("conv_small", 4224, 80),
        # Parameters of depthwise at width 32: 2 branches of 32·9 + 32 + 32·32 + 32.
        ("depthwise", 2752, 120),
        # Parameters of conv_light at width 32: 32·32·9 + 32.
        ("conv_light", 9248, 148),
        # Parameters of conv_heavy at width 32: 2 · 2 · (32·32·9 + 32); at width 4, with 8 hidden channels: 2
        # · (296 + 292).
        ("conv_heavy", 36992, 1176),
    ],
)
def test_parameter_counts_of_feature_map_blueprints_at_width_32_and_4(
    name: str, at_32: int, at_4: int
) -> None:
    sizes = [sum(p.numel() for p in build(name, width).parameters()) for width in (32, 4)]
    assert sizes == [at_32, at_4]


def test_attention_scales_each_channel_by_one_factor() -> None:
    seed = build("attention", 8)
    with torch.no_grad():
        for weight in seed.excite.other[-1].parameters():
            weight.zero_()
    h = torch.randn(3, 8, 5, 4, generator=torch.Generator().manual_seed(1))
    down, _, up = seed.excite.one
    squeezed = h.mean(dim=(2, 3))
    middle = F.gelu(squeezed @ down.weight[:, :, 0, 0].T + down.bias)
    factor = torch.tanh(middle @ up.weight[:, :, 0, 0].T + up.bias)
    assert factor.abs().min() > 1e-4
    torch.testing.assert_close(seed(h), h * factor[:, :, None, None], rtol=0, atol=1e-6)


def test_bottleneck_depends_on_a_3_by_3_neighbourhood_only() -> None:
    seed = build("bottleneck", 8)
    with torch.no_grad():
        for weight in seed.other[-1].parameters():
            weight.zero_()
    h = torch.randn(1, 8, 7, 7, generator=torch.Generator().manual_seed(1))
    changed = h.clone()
    changed[:, :, 3, 3] += 1.0
    touched = (seed(changed) != seed(h)).any(dim=1)[0]
    assert touched.nonzero().tolist() == [[row, column] for row in (2, 3, 4) for column in (2, 3, 4)]
