import numpy as np
import pytest

from esper.simic.rewards.terms import paired_potential, rent_potential


def test_a_lead_of_a_hundred_points_over_the_twin_is_one() -> None:
    # 62.5 against 50, 40 against 50, 100 against 0
    found = paired_potential(np.array([62.5, 40.0, 100.0]), np.array([50.0, 50.0, 0.0]))
    assert found.tolist() == pytest.approx([0.125, -0.1, 1.0])


def test_rent_is_due_per_thousand_parameters_and_never_pays() -> None:
    found = rent_potential(np.array([0.0, 500.0, 2500.0]), 0.02)
    assert found.tolist() == pytest.approx([0.0, -0.01, -0.05])
