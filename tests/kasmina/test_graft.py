"""Blend operators, which combine a seed's output with the features, and gates."""

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina import graft as blend
from esper.leyline import BlendOperator

H = torch.tensor([[[[1.0, -2.0]]]])
DELTA = torch.tensor([[[[0.5, 0.5]]]])


class Constant(nn.Module):
    """Seed that returns a constant delta."""

    def __init__(self, delta: Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, h: Tensor) -> Tensor:
        return self.delta


class HalfOpen(nn.Module):
    """Gate with output 0.5 at every position."""

    def forward(self, h: Tensor) -> Tensor:
        return torch.full_like(h[:, :1], 0.5)


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        (BlendOperator.ADD, [0.5, 0.5]),
        # The multiply operator changes features h by h · tanh(delta), with tanh(0.5) = 0.4621172.
        (BlendOperator.MULTIPLY, [0.4621172, -0.9242343]),
        (BlendOperator.GATE, [0.25, 0.25]),
    ],
)
def test_blend_operators_at_full_alpha_change_features_by_values_computed_by_hand(
    operator: BlendOperator, expected: list[float]
) -> None:
    change = blend.change(
        operator, H, Constant(DELTA), HalfOpen() if operator is BlendOperator.GATE else None
    )
    torch.testing.assert_close(change, torch.tensor([[[expected]]]))


def test_multiply_operator_changes_no_feature_by_more_than_its_absolute_value() -> None:
    change = blend.change(BlendOperator.MULTIPLY, H, Constant(torch.tensor([[[[1e9, -1e9]]]])), None)
    assert change.flatten().tolist() == [1.0, 2.0]


def test_gate_has_one_output_per_position_and_starts_at_sigmoid_1() -> None:
    gate = blend.Gate(3, "feature_map")
    opening = gate(torch.randn(2, 3, 4, 5))
    assert opening.shape == (2, 1, 4, 5)
    # The initial output of a gate is sigmoid(1) = 0.7310586.
    torch.testing.assert_close(opening, torch.full((2, 1, 4, 5), 0.7310586))
    assert blend.Gate(3, "tokens")(torch.randn(2, 7, 3)).shape == (2, 7, 1)
    with pytest.raises(RuntimeError, match="the GATE operator needs a gate module"):
        blend.change(BlendOperator.GATE, H, Constant(DELTA), None)


@pytest.mark.parametrize("operator", BlendOperator)
def test_input_of_a_blended_seed_requires_a_gradient_even_if_the_hosts_features_do_not(
    operator: BlendOperator,
) -> None:
    # In torch 2.13 the backward pass of a channels_last GroupNorm crashes if its input does not require a
    # gradient.
    seen: list[bool] = []
    seed = nn.Identity()
    seed.register_forward_hook(lambda _seed, args, _delta: seen.append(args[0].requires_grad))
    for features in (H.clone(), H.clone().requires_grad_()):
        wanted = features.requires_grad
        blend.change(operator, features, seed, HalfOpen())
        assert features.requires_grad == wanted
    with torch.no_grad():
        blend.change(operator, H, seed, HalfOpen())
    assert seen == [True, True, False], "no gradient is required under no_grad"
