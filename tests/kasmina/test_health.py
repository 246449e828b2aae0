import math

import pytest
import torch

from esper.kasmina.health import gradient_statistics


def statistics(*norms: float) -> tuple[float, float, bool, bool]:
    """Statistics of gradients with these norms, each over two values."""
    found = gradient_statistics([torch.tensor([norm, 0.0]) for norm in norms])
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ([3.0, 4.0], (5.0, 1.0, False, False)),
        ([10.0], (10.0, 1.0, False, False)),
        ([1e-7], (1e-7, 1.0, False, False)),
        ([0.0, 1.0], (1.0, 0.75, True, False)),  # 1 − 0.5·1/2
        ([9e-8, 0.0], (9e-8, 0.5, True, False)),
        ([0.0, 0.0, 3.0, 4.0], (5.0, 0.75, True, False)),
        ([12.0, 5.0], (13.0, 0.6, False, True)),  # 1 − 0.8·1/2
        ([12.0, 16.0], (20.0, 0.2, False, True)),
        ([0.0, 12.0], (12.0, 0.35, True, True)),  # 1 − 0.5/2 − 0.8/2
        ([0.0, 3.0, 4.0, 12.0], (13.0, 0.675, True, True)),
    ],
)
def test_literal_cases(norms: list[float], expected: tuple[float, float, bool, bool]) -> None:
    assert statistics(*norms) == pytest.approx(expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_has_no_health(bad: float) -> None:
    norm, health, vanishing, exploding = statistics(1.0, bad, 1.0, 1.0)
    assert not math.isfinite(norm)
    assert (health, vanishing, exploding) == (0.0, False, True)


def test_a_scalar_parameter_counts_as_one_tensor_and_nothing_measured_is_unknown() -> None:
    found = gradient_statistics([torch.tensor(0.0), torch.tensor([[3.0], [4.0]])])
    assert found == pytest.approx((5.0, 0.75, True, False))
    assert gradient_statistics([]) is None
