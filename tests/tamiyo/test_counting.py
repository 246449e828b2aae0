"""The controller that grows when going on has become the worse buy."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from esper.leyline import OP_GERMINATE, OP_WAIT, ActionSpace, Head, LifecycleRules, SlotConfig, SlotTable
from esper.leyline.signals import EnvFacts, EpochFacts
from esper.leyline.stages import Stage
from esper.tamiyo.counting import CountingController, CountingSettings
from esper.tamiyo.policy.action_masks import compute_batch_masks

NAMES = ("none", "stack")
SPACE = ActionSpace(SlotConfig.of_count(3), LifecycleRules(), (1,), NAMES)


def facts(step: int, *losses: float) -> EpochFacts:
    rest = dict.fromkeys(("params", "grown_params", "param_budget", "last_op"), 0)
    return EpochFacts.stack(
        [
            EnvFacts(
                epoch=step,
                max_epochs=100,
                val_loss=loss,
                **dict.fromkeys(("train_loss", "train_score", "val_score", "host_gradient_norm"), 0.0),
                **rest,
                last_success=True,
                ended=False,
                rolled_back=False,
            )
            for loss in losses
        ]
    )


def grown_at(loss_of, steps: int = 60, settings: CountingSettings | None = None) -> list[tuple[int, int]]:
    """Step and slot of every germination, when every one of them comes about."""
    controller, table = CountingController(SPACE, 1, settings), SlotTable.empty(1, 3)
    found = []
    for step in range(steps):
        [action] = controller.decide(facts(step, loss_of(step)), table).actions
        if action[Head.OP] == OP_GERMINATE:
            assert action[Head.BLUEPRINT] == 1
            slot = int(action[Head.SLOT])
            found.append((step, slot))
            table.stage[0, slot] = Stage.HOLDING
    return found


def test_a_loss_that_falls_fast_enough_is_left_alone():
    # Losses of 1 to 0.4 that fall by 0.1 a doubling: at least 10 % of what is left.
    assert grown_at(lambda step: 1.0 - 0.1 * math.log2(max(step, 1))) == []


def test_a_loss_at_rest_grows_as_soon_as_a_slope_is_known_upstream_first_and_no_faster_than_it_settles():
    # Six steps must lie between half of the way and now: 5 … 11. Then six from 1.25 · 11 = 14 on: 20; then
    # six from 25 on: 31. Three slots.
    assert grown_at(lambda step: 2.0) == [(11, 0), (20, 1), (31, 2)]


def test_what_counts_is_the_share_of_the_loss_per_doubling():
    def small(scale: float) -> Callable[[int], float]:
        return lambda step: scale * (1.0 - 0.05 * math.log2(max(step, 1)))

    never = CountingSettings(promise=0.04)
    assert grown_at(small(1.0), settings=never) == grown_at(small(100.0), settings=never) == []
    assert grown_at(small(1.0)) == grown_at(small(100.0)) != []


def test_environments_are_looked_at_apart_and_begin_anew():
    controller, table = CountingController(SPACE, 2), SlotTable.empty(2, 3)
    for _ in range(2):
        controller.reset(0)
        ops = [
            controller.decide(facts(step, 2.0, 1.0 - 0.1 * math.log2(max(step, 1))), table).actions[
                :, Head.OP
            ]
            for step in range(12)
        ]
        assert np.all(np.array(ops[:-1]) == OP_WAIT)
        assert ops[-1].tolist() == [OP_GERMINATE, OP_WAIT]


def test_where_nothing_may_be_planted_it_waits():
    controller, table = CountingController(SPACE, 1), SlotTable.empty(1, 3)
    table.enabled[:] = False
    for step in range(20):
        assert controller.decide(facts(step, 2.0), table).actions[0, Head.OP] == OP_WAIT


@pytest.mark.parametrize("at_once", [True, False])
def test_tempo_is_held_where_seeds_enter_at_once(at_once):
    space = ActionSpace(SlotConfig.of_count(3), LifecycleRules(enters_at_once=at_once), (1,), NAMES)
    masks = compute_batch_masks(SlotTable.empty(1, 3), space)
    assert (int(Head.TEMPO) in masks.held) == at_once
    assert int(Head.STYLE) in masks.holding(frozenset({int(Head.STYLE)})).held
    assert (int(Head.TEMPO) in masks.holding(frozenset()).held) == at_once
