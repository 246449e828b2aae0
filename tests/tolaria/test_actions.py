"""What an environment does with an action that it cannot carry out."""

import numpy as np
import pytest

from esper.kasmina.blueprints import blueprint_named
from esper.leyline import BlueprintAction, LifecycleOp, Stage
from esper.leyline.errors import InvalidActionError
from esper.leyline.events import DecisionRow
from esper.leyline.slot_table import IntArray
from tests.contracts.matrix import registered
from tests.tolaria.building import WAIT, action, bits, plant, run, stages_of, started


@pytest.mark.parametrize(
    "illegal",
    [
        plant(1),
        action(LifecycleOp.SET_ALPHA_TARGET, 1),
        action(LifecycleOp.FOSSILIZE, 1),
        action(LifecycleOp.PRUNE, 0),
        action(LifecycleOp.ADVANCE, 1),
        action(LifecycleOp.PRUNE, 1),
    ],
    ids=["occupied", "not blended", "not held", "empty", "auto-forward", "too young"],
)
def test_an_illegal_action_is_refused_and_is_no_more_than_waiting(illegal: IntArray) -> None:
    (env, sink), (twin, _) = started(), started()
    run(env, {0: plant(1)}, until=1)
    run(twin, {0: plant(1)}, until=1)
    facts, expected = env.step(illegal), twin.step(WAIT)
    decision = sink.of(DecisionRow)[-1]
    assert (decision.succeeded, decision.refused_by) == (False, "legality")
    assert decision.failed_checks == [LifecycleOp(int(illegal[0])).name.lower()]
    assert (facts.last_op, facts.last_success) == (illegal[0], False)
    assert bits(env.model.state()) == bits(twin.model.state())
    assert facts.val_loss == expected.val_loss
    assert env._refused == 1


def test_a_gate_refuses_a_blueprint_of_another_topology_or_width_by_name_and_the_episode_goes_on() -> None:
    # Slots of the tiny host are 2, 4 and 4 wide.
    light = blueprint_named("conv_light", "feature_map").build
    with registered("fours", light, multiple_of=4):
        fours = BlueprintAction(blueprint_named("fours", "feature_map").index)
        (env, sink), (twin, _) = started(), started()
        for blueprint in (BlueprintAction.MLP, fours):
            facts, expected = env.step(plant(0, blueprint)), twin.step(WAIT)
            assert (facts.val_loss, facts.last_success) == (expected.val_loss, False)
        found = [(row.succeeded, row.refused_by, row.failed_checks) for row in sink.of(DecisionRow)]
        assert found == [(False, "G0", ["blueprint_selectable"]), (False, "G0", ["blueprint_fits"])]
        assert bits(env.model.state()) == bits(twin.model.state())
        env.step(plant(1, fours))
        assert stages_of(env) == [Stage.DORMANT, Stage.TRAINING, Stage.DORMANT]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (action(LifecycleOp.WAIT, 3), "head slot of environment 0 has value 3; allowed are 0 to 2"),
        (action(LifecycleOp.GERMINATE, 0, blueprint=13), "head blueprint of environment 0 has value 13"),
        (np.zeros(7, dtype=np.int64), r"actions must have shape \(1, 8\); found \(1, 7\)"),
    ],
)
def test_an_action_outside_its_heads_is_an_error(row: IntArray, sentence: str) -> None:
    env, _ = started()
    with pytest.raises(InvalidActionError, match=sentence):
        env.step(row)
    assert env.epoch == 0


def test_a_disabled_slot_never_germinates() -> None:
    env, sink = started(enabled=(False, True, True))
    for epoch in range(4):
        env.step(plant(0 if epoch < 3 else 1))
    assert [row.refused_by for row in sink.of(DecisionRow)] == ["legality"] * 3 + [None]
    assert stages_of(env) == [Stage.DORMANT, Stage.TRAINING, Stage.DORMANT]
    env.reset(1)
    assert env.table.enabled.tolist() == [[False, True, True]], "the next episode keeps it disabled"
