"""Parameter counts and formulas of the blueprints for feature maps; other tests of blueprints are in
tests/contracts."""

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
        # attention at width 32 has two branches of two layers, with 32·4 + 4 and 4·32 + 32 parameters; at
        # width 4 the layers of a branch (2 hidden units) have 10 and 12 parameters.
        ("attention", 584, 44),
        # bottleneck at width 32 has two branches of three layers, with 132, 148 and 160 parameters; at width
        # 4 the layers of a branch (4 hidden channels) have 20, 148 and 20 parameters.
        ("bottleneck", 880, 376),
        # Parameters of conv_small at width 32: 2 branches of 2 layers with 32·32 + 32 parameters.
        ("conv_small", 4224, 80),
        # depthwise at width 32 has two branches of two layers, with 32·9 + 32 and 32·32 + 32 parameters.
        ("depthwise", 2752, 120),
        # conv_light at width 32 is one 3×3 convolution, with 32·32·9 weights and 32 biases.
        ("conv_light", 9248, 148),
        # conv_heavy at width 32 has two branches of two layers, each with 32·32·9 + 32 parameters; at width 4
        # the layers of a branch (8 hidden channels) have 296 and 292 parameters.
        ("conv_heavy", 36992, 1176),
    ],
)
def test_parameter_counts_of_feature_map_blueprints_at_width_32_and_4(
    name: str, at_32: int, at_4: int
) -> None:
    sizes = [sum(p.numel() for p in build(name, width).parameters()) for width in (32, 4)]
    assert sizes == [at_32, at_4]


def test_attention_seed_for_feature_maps_scales_each_channel_by_one_factor() -> None:
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


def test_changed_input_position_affects_the_output_of_a_bottleneck_seed_only_there_and_next_to_it() -> None:
    seed = build("bottleneck", 8)
    with torch.no_grad():
        for weight in seed.other[-1].parameters():
            weight.zero_()
    h = torch.randn(1, 8, 7, 7, generator=torch.Generator().manual_seed(1))
    changed = h.clone()
    changed[:, :, 3, 3] += 1.0
    touched = (seed(changed) != seed(h)).any(dim=1)[0]
    assert touched.nonzero().tolist() == [[row, column] for row in (2, 3, 4) for column in (2, 3, 4)]
