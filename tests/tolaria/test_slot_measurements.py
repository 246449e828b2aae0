import math

import numpy as np
import pytest
from esper.tolaria.slot_measurements import record_training, record_worth

from esper.kasmina.contributions import attribute
from esper.kasmina.health import GradientStatistics
from esper.leyline import SlotTable
from esper.tolaria.epoch import EpochTraining
from tests.tolaria.building import every_choice


@pytest.mark.parametrize(("host_norm", "ratio"), [(4.0, 0.5), (0.0, math.nan)])
def test_the_gradient_of_a_seed_is_measured_against_the_host_s(host_norm: float, ratio: float) -> None:
    table = SlotTable.empty(1, 3)
    found = GradientStatistics(norm=2.0, health=0.75, vanishing=True, exploding=False)
    record_training(table, EpochTraining(1.0, 50.0, host_norm, 0, {1: found}))
    assert table.gradient_norm_ratio[0, 1] == pytest.approx(ratio, nan_ok=True)
    assert (table.gradient_norm[0, 1], table.gradient_health[0, 1]) == (2.0, 0.75)
    assert (table.vanishing[0, 1], table.exploding[0, 1]) == (1.0, 0.0)
    assert np.isnan(table.gradient_norm[0, [0, 2]]).all(), "the others were not measured"


def test_contributions_go_to_the_slots_that_were_switched() -> None:
    # Mean scores: none 10, second 20, first 40, both 80, as worked by hand in test_counterfactual.
    scores = np.array([[10.0, 10.0], [10.0, 30.0], [40.0, 40.0], [70.0, 90.0]])
    table = SlotTable.empty(1, 3)
    record_worth(table, attribute((0, 2), every_choice(2), scores, np.zeros(4), [(0, 1), (1, 0)]))
    assert table.contribution[0, [0, 2]].tolist() == [60.0, 40.0]
    assert table.contribution_error[0, [0, 2]] == pytest.approx([0.0, 10.0])
    assert table.shapley[0, [0, 2]].tolist() == [45.0, 25.0]
    assert table.interaction_sum[0, [0, 2]].tolist() == [30.0, 30.0]
    assert table.strongest_boost[0, [0, 2]].tolist() == [30.0, 30.0]
    assert np.isnan([table.contribution[0, 1], table.shapley[0, 1], table.interaction_sum[0, 1]]).all()
