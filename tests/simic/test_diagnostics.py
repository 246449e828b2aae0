import math

import pytest
import torch

from esper.simic.diagnostics import (
    RatioExplosionDiagnostic,
    correlation,
    explained_variance,
    first_non_finite,
)


def test_explained_variance_is_1_minus_variance_of_residuals_over_variance_of_returns() -> None:
    # Residuals (return − value) 1, 2, 3, 4 have variance 1.25; returns 2, 4, 6, 8 have variance 5.
    values, returns = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[2.0, 4.0], [6.0, 8.0]])
    assert explained_variance(values, returns) == pytest.approx(0.75)
    assert explained_variance(returns, returns) == 1.0
    # Residuals 3, 6, 9, 12 have variance 11.25, so the explained variance is 1 − 11.25 / 5 = −1.25.
    assert explained_variance(-values, returns) == pytest.approx(-1.25)


def test_explained_variance_of_nearly_constant_returns_divides_by_a_minimum_variance() -> None:
    # Residuals of ±0.05 have variance 0.0025, which is divided by the variance floor of 0.01.
    values, returns = torch.tensor([0.95, 1.05]), torch.tensor([1.0, 1.0])
    assert explained_variance(values, returns) == pytest.approx(0.75, abs=1e-4)


def test_correlation_is_1_or_minus_1_for_linearly_related_tensors_and_0_for_uncorrelated_tensors() -> None:
    a = torch.tensor([1.0, 2.0, 4.0])
    assert correlation(a, 3.0 * a + 5.0) == pytest.approx(1.0)
    assert correlation(a, -a) == pytest.approx(-1.0)
    # The deviations −1, 0, 1 and 1/3, −2/3, 1/3 of two tensors from their means have covariance 0.
    assert correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, 1.0])) == pytest.approx(0.0)


def test_correlation_with_a_constant_tensor_is_none() -> None:
    assert correlation(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0])) is None


def test_first_non_finite_number_is_described_by_tensor_environment_and_step() -> None:
    fine, broken = torch.zeros(2, 3), torch.zeros(2, 3)
    broken[1, 2] = math.inf
    assert first_non_finite(reward=fine, value=fine) is None
    assert first_non_finite(reward=fine, value=broken) == "value of environment 1 at step 2 is inf"


def diagnose(head: int, change: float) -> RatioExplosionDiagnostic | None:
    """Return the ratio diagnostic after adding ``change`` to one log-probability of ``head``."""
    before = torch.full((2, 3, 8), -1.0)
    after = before.clone()
    after[1, 2, head] += change
    after[1, 2, 7] += 0.01
    actions = torch.arange(48).reshape(2, 3, 8)
    return RatioExplosionDiagnostic.of((after - before).sum(dim=-1), after, before, actions)


def test_ratio_diagnostic_is_none_if_all_probability_ratios_are_in_the_allowed_range() -> None:
    assert diagnose(2, math.log(4.9)) is None
    assert diagnose(2, math.log(0.11)) is None


@pytest.mark.parametrize("change", [2.0, -3.0])
def test_ratio_diagnostic_reports_environment_step_head_and_action(change: float) -> None:
    found = diagnose(2, change)
    assert found is not None
    # The actions are the numbers 0 to 47 in order; environment 1, step 2, head 2 has 1·24 + 2·8 + 2 = 42.
    assert (found.env, found.step, found.head, found.action) == (1, 2, "blueprint", 42)
    assert found.ratio == pytest.approx(math.exp(change + 0.01), rel=1e-4)
    assert found.old_log_prob == -1.0
    assert found.new_log_prob == pytest.approx(change - 1.0)


def test_ratio_diagnostic_reports_the_most_extreme_ratio_and_treats_nan_as_most_extreme() -> None:
    log_ratio = torch.tensor([[1.0, 20.0, 0.01], [9.0, 1.0, 1.0]]).log()
    logs, actions = torch.zeros(2, 3, 8), torch.zeros(2, 3, 8, dtype=torch.int64)
    found = RatioExplosionDiagnostic.of(log_ratio, logs, logs, actions)
    assert found is not None
    assert (found.env, found.step) == (0, 2)  # Ratio 0.01 is the most extreme: |ln 0.01| > ln 20.
    log_ratio[0, 0], log_ratio[1, 0] = 100.0, 200.0  # Ratios e^100 and e^200 are infinite in float32.
    found = RatioExplosionDiagnostic.of(log_ratio, logs, logs, actions)
    assert found is not None
    assert (found.env, found.step) == (1, 0)
    log_ratio[1, 1] = torch.nan
    found = RatioExplosionDiagnostic.of(log_ratio, logs, logs, actions)
    assert found is not None
    assert (found.env, found.step) == (1, 1)
