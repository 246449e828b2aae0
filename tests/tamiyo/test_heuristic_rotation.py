"""The heuristic's rotation on both kinds of host: every blueprint gets its turn, and no other is tried."""

import numpy as np
import pytest

from esper.leyline import Head, SlotTable
from esper.tamiyo import HeuristicController
from esper.tamiyo.heuristic import default_rotation
from tests.contracts.matrix import begin
from tests.leyline.building import CNN, TRANSFORMER, assert_legal, facts_of, space_of


@pytest.mark.parametrize("blueprints", [CNN, TRANSFORMER], ids=["feature_map", "tokens"])
def test_where_every_seed_dies_each_blueprint_is_tried_before_any_comes_again(
    blueprints: tuple[int, ...],
) -> None:
    space = space_of(1, blueprints)
    heuristic = HeuristicController(space, 1)
    table = SlotTable.empty(1, 1)  # and stays so: no seed survives its first epoch
    tried = []
    for epoch in range(8):
        action = heuristic.decide(facts_of(epoch), table).actions
        assert_legal(action, table, space)
        tried.append(int(action[0, Head.BLUEPRINT]))
    assert tried == [*default_rotation(space), tried[0]]


def test_what_does_not_fit_the_host_has_no_turn() -> None:
    space = begin("tokens", 6).model.action_space
    names = [space.blueprint_names[index] for index in default_rotation(space)]
    assert names[:5] == ["mlp", "mlp_small", "lora_large", "lora", "norm"]
    assert not {"attention", "flex_attention"} & set(names), "six is no multiple of four heads"
    assert np.isin(default_rotation(space), space.blueprints).all()
