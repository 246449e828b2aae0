"""The counting controller germinates when longer training gains less than a larger network."""

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
"""Number of minibatches per step of the simulated training."""


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
    """Return step and slot of every germination that the counting controller decides for a loss curve."""
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
    """Return a loss curve: ``scale`` at step 16, minus ``by * scale`` per doubling of the step number."""
    return lambda step: scale * (1.0 - by * math.log2(max(step, 1) / 16))


def test_no_germination_while_doubling_compute_lowers_the_loss_by_more_than_a_larger_network_would():
    # Step 9 is the first with enough losses for a fit of the slope.
    # First curve: loss at step 9 is 1 + 0.1 · log2(16 / 9) = 1.083, and doubling compute reduces it by 9.2 %.
    # Second curve: loss at step 9 is 1 + 0.09 · log2(16 / 9) = 1.075, and doubling compute reduces it by 8.4
    # %.
    # A network of twice the cost is expected to reduce the loss by 9 % (setting ``promise``).
    assert grown_at(falling(0.1)) == []
    assert grown_at(falling(0.09))[0] == (9, 0)


def test_constant_loss_causes_germinations_upstream_first_with_a_settling_time_between_them():
    # First germination at step 9: the loss fit over steps 4 to 9 has the minimum of 500 minibatches (5
    # steps).
    # Second germination at step 16: 5 steps after the first seed has settled, at step 1.25 · 9 = 11.
    # Third germination at step 29: half a doubling of compute after the second seed has settled, at 1.25 · 16
    # = 20.
    # No slot is free after three germinations.
    assert grown_at(lambda step: 2.0) == [(9, 0), (16, 1), (29, 2)]


def test_no_germination_while_the_slope_of_the_loss_is_uncertain():
    # The loss alternates between 5 % above and 5 % below a constant.
    # A line fitted to the losses of steps 4 to 9 has slope 3.8 % per doubling and standard error 6.1 %.
    # A line fitted to the losses of steps 5 to 10 has slope −4.3 % per doubling and standard error 6.9 %.
    assert grown_at(lambda step: 2.0 + 0.1 * (-1) ** step)[0] == (10, 0)


def test_counting_controller_does_not_germinate_while_a_fitted_loss_is_nan():
    # Fits of the loss start at half the present step, so step 8 is in all fits until step 17.
    assert grown_at(lambda step: math.nan if step == 8 else 2.0)[0] == (18, 0)


def test_steps_of_germinations_do_not_depend_on_the_scale_of_the_loss():
    assert grown_at(falling(0.05, 100.0)) == grown_at(falling(0.05)) != []


def test_first_germination_waits_for_a_minimum_number_of_minibatches():
    # At ten minibatches per step, the loss fit over steps 49 to 99 is the first that spans 500 minibatches.
    assert grown_at(lambda step: 2.0, steps=110, minibatches=10) == [(99, 0)]


def test_first_germination_waits_for_a_minimum_number_of_steps():
    # At 1,000 minibatches per step, the fit over steps 3 to 7 is the first with the minimum of five losses.
    assert grown_at(lambda step: 2.0, minibatches=1000)[0] == (7, 0)


def test_counting_controller_has_a_loss_curve_per_environment_and_reset_clears_all_curves():
    controller, table = CountingController(SPACE, 2), SlotTable.empty(2, 3)
    for _ in range(2):
        controller.reset(0)
        ops = [
            controller.decide(facts(step, 2.0, falling(0.1)(step)), table).actions[:, Head.OP]
            for step in range(10)
        ]
        assert np.all(np.array(ops[:-1]) == OP_WAIT)
        assert ops[-1].tolist() == [OP_GERMINATE, OP_WAIT]


def test_counting_controller_waits_if_no_germination_is_legal():
    controller, table = CountingController(SPACE, 1), SlotTable.empty(1, 3)
    table.enabled[:] = False
    for step in range(20):
        assert controller.decide(facts(step, 2.0), table).actions[0, Head.OP] == OP_WAIT


@pytest.mark.parametrize("at_once", [True, False])
def test_tempo_head_is_fixed_if_the_first_alpha_ramp_has_length_0(at_once):
    space = ActionSpace(SlotConfig.of_count(3), LifecycleRules(enters_at_once=at_once), (1,), NAMES)
    masks = compute_batch_masks(SlotTable.empty(1, 3), space)
    assert (int(Head.TEMPO) in masks.held) == at_once
    assert int(Head.STYLE) in masks.holding(frozenset({int(Head.STYLE)})).held
    assert (int(Head.TEMPO) in masks.holding(frozenset()).held) == at_once
