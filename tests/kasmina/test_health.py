"""Gradient health of a seed, computed from the norms of its gradients."""

import math

import pytest
import torch

from esper.kasmina.incubation import statistics_of


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ([3.0, 4.0], (5.0, 1.0, False, False)),
        ([10.0], (10.0, 1.0, False, False)),
        ([1e-7], (1e-7, 1.0, False, False)),
        # Gradient health with one of two gradients vanishing: 1 − 0.5·1/2.
        ([0.0, 1.0], (1.0, 0.75, True, False)),
        ([9e-8, 0.0], (9e-8, 0.5, True, False)),
        ([0.0, 0.0, 3.0, 4.0], (5.0, 0.75, True, False)),
        # Gradient health with one of two gradients exploding: 1 − 0.8·1/2.
        ([12.0, 5.0], (13.0, 0.6, False, True)),
        ([12.0, 16.0], (20.0, 0.2, False, True)),
        # Gradient health with one of two gradients vanishing and the other exploding: 1 − 0.5/2 − 0.8/2.
        ([0.0, 12.0], (12.0, 0.35, True, True)),
        ([0.0, 3.0, 4.0, 12.0], (13.0, 0.675, True, True)),
    ],
)
def test_gradient_statistics_of_given_gradient_norms_equal_values_computed_by_hand(
    norms: list[float], expected: tuple[float, float, bool, bool]
) -> None:
    assert statistics_of(torch.tensor(norms)) == pytest.approx(expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_gradient_gives_gradient_health_0_and_counts_as_exploding(bad: float) -> None:
    norm, health, vanishing, exploding = statistics_of(torch.tensor([1.0, bad, 1.0, 1.0]))
    assert not math.isfinite(norm)
    assert (health, vanishing, exploding) == (0.0, False, True)
