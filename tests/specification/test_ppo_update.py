"""A policy update reports the metrics of the specification and stops at its limit of the KL divergence."""

import math

import pytest
import torch

from tests.simic.oracles.lifecycle_envs import Lifecycle
from tests.simic.rollouts import agent_of, roll, weights


def test_update_reports_the_specified_metrics_as_finite_numbers() -> None:
    policy, buffer = roll(Lifecycle, num_envs=8)
    columns = agent_of(policy).update(buffer, 0.0).columns()
    losses, ratios = ("policy_loss", "value_loss", "entropy"), ("ratio_mean", "ratio_max", "approx_kl")
    found = {name: columns[name] for name in (*losses, *ratios, "explained_variance")}
    assert {name for name, value in found.items() if value is None or not math.isfinite(value)} == set()


@pytest.mark.parametrize(("rate", "target"), [(0.1, 1e-6), (1e-3, 1e-3), (1e-3, 4e-3)])
def test_update_stops_before_the_next_gradient_step_if_the_kl_divergence_exceeds_its_limit(
    rate: float, target: float
) -> None:
    policy, buffer = roll(Lifecycle, num_envs=8)
    stopped = agent_of(policy, update_epochs=6, learning_rate=rate, target_kl=target)
    metrics = stopped.update(buffer, 0.0)
    stop = metrics.early_stop_update_epoch
    assert stop is not None
    assert (stop == 1) if rate == 0.1 else (1 < stop < 6)
    assert metrics.approx_kl > 1.5 * target, "the reported KL is the one that stopped the update"
    exact = agent_of(policy, update_epochs=stop, learning_rate=rate, target_kl=1e9)
    assert exact.update(buffer, 0.0).early_stop_update_epoch is None
    assert torch.equal(weights(stopped), weights(exact)), "exactly that number of steps was taken"
