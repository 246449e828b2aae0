"""An environment refuses illegal actions and values outside the range of their action head."""

import numpy as np
import pytest

from esper.leyline import LifecycleOp, Stage
from esper.leyline.errors import InvalidActionError
from esper.leyline.rows import DecisionRow
from esper.leyline.slot_table import IntArray
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
    ids=[
        "germinate in an occupied slot",
        "alpha target of an incubating seed",
        "fossilize an incubating seed",
        "prune an empty slot",
        "advance with auto-forward",
        "prune a seed below the minimum age",
    ],
)
def test_environment_treats_a_refused_illegal_action_as_wait(illegal: IntArray) -> None:
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
    assert env.recorder.refused == 1


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (action(LifecycleOp.WAIT, 3), "head slot of environment 0 has value 3; allowed are 0 to 2"),
        (action(LifecycleOp.WAIT, -1), "head slot of environment 0 has value -1"),
        (action(LifecycleOp.GERMINATE, 0, blueprint=13), "head blueprint of environment 0 has value 13"),
        (np.zeros(7, dtype=np.int64), r"actions must have shape \(1, 8\); found \(1, 7\)"),
    ],
    ids=["slot above the last", "negative slot", "blueprint above the last", "seven heads"],
)
def test_action_with_a_value_outside_the_range_of_its_head_raises_an_error_without_a_step(
    row: IntArray, sentence: str
) -> None:
    env, _ = started()
    with pytest.raises(InvalidActionError, match=sentence):
        env.step(row)
    assert env.epoch == 0


def test_germination_in_a_disabled_slot_is_refused_and_the_slot_stays_disabled_in_the_next_episode() -> None:
    env, sink = started(enabled=(False, True, True))
    for epoch in range(4):
        env.step(plant(0 if epoch < 3 else 1))
    assert [row.refused_by for row in sink.of(DecisionRow)] == ["legality"] * 3 + [None]
    assert stages_of(env) == [Stage.DORMANT, Stage.TRAINING, Stage.DORMANT]
    env.reset(1)
    assert env.table.enabled.tolist() == [[False, True, True]]
