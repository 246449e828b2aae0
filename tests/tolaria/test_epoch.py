"""Recording of an epoch's gradient statistics in the slot table."""

import math

import numpy as np
import pytest

from esper.leyline import GradientStatistics, SlotTable
from esper.tolaria.minibatch import EpochTraining, record_gradients


@pytest.mark.parametrize(("host_norm", "ratio"), [(4.0, 0.5), (0.0, math.nan)])
def test_gradient_statistics_of_seeds_are_recorded_with_the_ratio_to_the_hosts_gradient_norm(
    host_norm: float, ratio: float
) -> None:
    table = SlotTable.empty(1, 3)
    found = GradientStatistics(norm=2.0, health=0.75, vanishing=True, exploding=False)
    record_gradients(table, EpochTraining(1.0, 50.0, host_norm, 0, {1: found}))
    assert table.gradient_norm_ratio[0, 1] == pytest.approx(ratio, nan_ok=True)
    assert (table.gradient_norm[0, 1], table.gradient_health[0, 1]) == (2.0, 0.75)
    assert (table.vanishing[0, 1], table.exploding[0, 1]) == (1.0, 0.0)
    assert np.isnan(table.gradient_norm[0, [0, 2]]).all(), "slots without measurements stay NaN"
