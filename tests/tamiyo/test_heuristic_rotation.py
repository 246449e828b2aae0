"""The heuristic's rotation on both kinds of host: every blueprint gets its turn, and no other is tried."""

import numpy as np
import pytest

from esper.leyline import OP_GERMINATE, EpochFacts, Head, SlotTable
from esper.tamiyo import HeuristicController, HeuristicSettings
from esper.tamiyo.heuristic import default_rotation
from esper.tolaria.tasks import TaskSpec
from esper.tolaria.vector import SerialVector
from tests.contracts.matrix import begin
from tests.leyline.building import CNN, TRANSFORMER, assert_legal, facts_of, space_of
from tests.tolaria.building import tiny_task, token_task

TASKS = [tiny_task((4,) * 7), token_task((4,) * 7, batches_per_epoch=1)]


@pytest.mark.parametrize("task", TASKS, ids=["feature_map", "tokens"])
def test_seven_slots_are_planted_with_the_first_seven_blueprints_of_the_host(task: TaskSpec) -> None:
    vector = SerialVector(task, rng_seed=0)
    facts: EpochFacts = vector.reset()
    space = vector.action_space
    heuristic = HeuristicController(space, 1, HeuristicSettings(rotate=True))
    planted = []
    for _ in range(7):
        actions = heuristic.decide(facts, vector.table).actions
        facts = vector.step(actions)
        if actions[0, Head.OP] == OP_GERMINATE:
            assert facts.last_success[0]
            planted.append(int(actions[0, Head.BLUEPRINT]))
    assert planted == list(default_rotation(space))[:7]
    assert sorted(default_rotation(space)) == sorted(space.blueprints)


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
