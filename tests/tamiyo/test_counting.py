"""Counting controller: germinates when longer training gains less than a larger network."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from esper.leyline import OP_GERMINATE, OP_WAIT, ActionSpace, Head, LifecycleRules, SlotConfig, SlotTable
from esper.leyline.signals import EnvFacts, EpochFacts
from esper.leyline.stages import Stage
from esper.tamiyo.counting import CountingController
from esper.tamiyo.policy.action_masks import compute_batch_masks

NAMES = ("none", "stack")
SPACE = ActionSpace(SlotConfig.of_count(3), LifecycleRules(), (1,), NAMES)


MINIBATCHES = 100
"""Minibatches per step."""


def facts(step: int, *losses: float, minibatches: int = MINIBATCHES) -> EpochFacts:
    rest = dict.fromkeys(("params", "grown_params", "param_budget", "last_op"), 0)
    return EpochFacts.stack(
        [
            EnvFacts(
                epoch=step,
                max_epochs=100,
                train_loss=loss if step else math.nan,
                **dict.fromkeys(("val_loss", "train_score", "val_score", "host_gradient_norm"), 0.0),
                **rest,
                last_success=True,
                ended=False,
                rolled_back=False,
                minibatches=minibatches * step,
            )
            for loss in losses
        ]
    )


def grown_at(loss_of: Callable[[int], float], steps: int = 60, **facts_of: int) -> list[tuple[int, int]]:
    """Return step and slot of every germination; every germination succeeds."""
    controller, table = CountingController(SPACE, 1), SlotTable.empty(1, 3)
    found = []
    for step in range(steps):
        [action] = controller.decide(facts(step, loss_of(step), **facts_of), table).actions
        if action[Head.OP] == OP_GERMINATE:
            assert action[Head.BLUEPRINT] == 1
            slot = int(action[Head.SLOT])
            found.append((step, slot))
            table.stage[0, slot] = Stage.HOLDING
    return found


def falling(by: float, scale: float = 1.0) -> Callable[[int], float]:
    """Return a loss of ``scale`` at step 16 that falls by ``by * scale`` per doubling of compute."""
    return lambda step: scale * (1.0 - by * math.log2(max(step, 1) / 16))


def test_no_germination_while_the_loss_falls_faster_than_promised():
    # The fit is exact: at step 9, the first with enough points, a doubling reduces the loss by 0.1 of
    # 1 + 0.1 · log2(16 / 9) = 1.083, which is 9.2 %, and later more; 0.09 of 1.075 is 8.4 %. Growth
    # promises 9 %.
    assert grown_at(falling(0.1)) == []
    assert grown_at(falling(0.09))[0] == (9, 0)


def test_constant_loss_germinates_upstream_first_after_each_settling_time():
    # 500 minibatches are 5 steps: the last doubling has them at step 9 (4 … 9). Then 5 steps from 1.25 · 9 =
    # 11: 16. Then half a doubling from 1.25 · 16 = 20: 28.3. There are three slots.
    assert grown_at(lambda step: 2.0) == [(9, 0), (16, 1), (29, 2)]


def test_no_germination_while_the_slope_is_uncertain():
    # A constant loss that alternates by 5 %: over 4 … 9 the slope is 3.8 % and its standard error 6.1 %, over
    # 5 … 10 they are −4.3 % and 6.9 %.
    assert grown_at(lambda step: 2.0 + 0.1 * (-1) ** step)[0] == (10, 0)


def test_nan_loss_in_the_fit_prevents_germination():
    assert grown_at(lambda step: math.nan if step == 8 else 2.0)[0] == (18, 0)  # 17 // 2 is still 8


def test_germinations_do_not_depend_on_the_scale_of_the_loss():
    assert grown_at(falling(0.05, 100.0)) == grown_at(falling(0.05)) != []


def test_fit_needs_a_minimum_of_minibatches():
    # Ten minibatches per step: the last doubling has 500 of them from step 99 on (49 … 99).
    assert grown_at(lambda step: 2.0, steps=110, minibatches=10) == [(99, 0)]


def test_fit_needs_a_minimum_of_steps():
    # 1,000 minibatches per step; five points are needed nevertheless: 3 … 7.
    assert grown_at(lambda step: 2.0, minibatches=1000)[0] == (7, 0)


def test_environments_have_separate_curves_that_reset_clears():
    controller, table = CountingController(SPACE, 2), SlotTable.empty(2, 3)
    for _ in range(2):
        controller.reset(0)
        ops = [
            controller.decide(facts(step, 2.0, falling(0.1)(step)), table).actions[:, Head.OP]
            for step in range(10)
        ]
        assert np.all(np.array(ops[:-1]) == OP_WAIT)
        assert ops[-1].tolist() == [OP_GERMINATE, OP_WAIT]


def test_controller_waits_without_a_legal_germination():
    controller, table = CountingController(SPACE, 1), SlotTable.empty(1, 3)
    table.enabled[:] = False
    for step in range(20):
        assert controller.decide(facts(step, 2.0), table).actions[0, Head.OP] == OP_WAIT


@pytest.mark.parametrize("at_once", [True, False])
def test_tempo_head_is_fixed_if_seeds_enter_at_once(at_once):
    space = ActionSpace(SlotConfig.of_count(3), LifecycleRules(enters_at_once=at_once), (1,), NAMES)
    masks = compute_batch_masks(SlotTable.empty(1, 3), space)
    assert (int(Head.TEMPO) in masks.held) == at_once
    assert int(Head.STYLE) in masks.holding(frozenset({int(Head.STYLE)})).held
    assert (int(Head.TEMPO) in masks.holding(frozenset()).held) == at_once
