"""Steps of an episode: order of phases, stage moves, learning rates, measurement of fossils."""

import math
from dataclasses import replace

import numpy as np
import pytest

from esper.leyline import AlphaSpeed, AlphaTarget, LifecycleOp, LifecycleRules, Stage
from esper.leyline.rows import CounterfactualRow, DecisionRow
from esper.tolaria.env import MorphEnv
from tests.tolaria.building import SMALL_RULES, WAIT, action, plant, run, stages_of, started, tiny_task


def test_stage_age_and_alpha_of_a_seed_have_the_expected_values_after_each_epoch() -> None:
    env, _ = started(tiny_task(horizon=14))
    speeds = {"half": AlphaSpeed.FAST, "full": AlphaSpeed.INSTANT}
    half, full = (
        action(LifecycleOp.SET_ALPHA_TARGET, 1, alpha_target=AlphaTarget[name.upper()], alpha_speed=speed)
        for name, speed in speeds.items()
    )
    lines = []
    for chosen in (plant(1), WAIT, WAIT, WAIT, WAIT, WAIT, half, WAIT, WAIT, WAIT, full, WAIT):
        assert env.step(chosen).last_success
        table, at = env.table, (0, 1)
        alpha = round(float(table.alpha[at]), 3)
        lines.append((Stage(int(table.stage[at])).name, table.age[at], table.epochs_in_stage[at], alpha))
    # The seed has two epochs of incubation and one epoch each at alpha 1/3, 2/3 and 1, and then stage
    # HOLDING. The first SET_ALPHA_TARGET action gives one epoch each at alpha 0.833, 0.667 and 0.5, the
    # second gives alpha 1 at once. Each line of the expected list has the alpha of the next epoch.
    assert lines == [
        ("TRAINING", 1, 1, 0.0),
        ("BLENDING", 2, 0, 0.333),
        ("BLENDING", 3, 1, 0.667),
        ("BLENDING", 4, 2, 1.0),
        ("HOLDING", 5, 0, 1.0),
        ("HOLDING", 6, 1, 1.0),
        ("BLENDING", 7, 1, 0.667),
        ("BLENDING", 8, 2, 0.5),
        ("BLENDING", 9, 3, 0.5),
        ("BLENDING", 10, 4, 0.5),
        ("HOLDING", 11, 0, 1.0),
        ("HOLDING", 12, 1, 1.0),
    ]


def test_seed_changes_stage_only_by_the_op_advance_if_auto_forward_is_off() -> None:
    env, sink = started(tiny_task(horizon=14, rules=replace(SMALL_RULES, auto_forward=False)))
    advance = action(LifecycleOp.ADVANCE, 1)
    stages = []
    for chosen in (plant(1), WAIT, advance, advance, advance):
        env.step(chosen)
        stages.append(stages_of(env)[1].name)
    assert stages == ["GERMINATED", "GERMINATED", "TRAINING", "TRAINING", "BLENDING"]
    # The second ADVANCE action is refused, because the seed has had only one of two epochs of incubation.
    found = [(row.refused_by, row.failed_checks) for row in sink.of(DecisionRow)[2:]]
    assert found == [(None, []), ("G2", ["epochs"]), (None, [])]


def test_reset_returns_the_validation_loss_of_the_untrained_host_and_nan_as_training_loss() -> None:
    env = MorphEnv(tiny_task(), rng_seed=0)
    facts = env.reset()
    assert (facts.epoch, facts.last_op, facts.last_success, facts.ended) == (0, LifecycleOp.WAIT, True, False)
    assert math.isnan(facts.train_loss)
    assert math.isnan(facts.host_gradient_norm)
    assert 0.0 <= facts.val_score <= 100.0
    assert facts.val_loss > 0.0
    # Parameters of the host with widths 2-4-4 and 1×1 kernels: convolutions (2+2) + (8+4) + (16+4), GroupNorm
    # 2·(2+4+4), head 40+10.
    assert (facts.params, facts.grown_params, facts.param_budget) == (106, 0, 20 * 106)


def test_cosine_schedule_of_a_seed_starts_at_its_germination_and_that_of_the_host_at_epoch_0() -> None:
    env, _ = started(tiny_task(horizon=4, rules=LifecycleRules(min_training_epochs=9)))
    host, seed = [], []
    for epoch in range(4):
        env.step(plant(0) if epoch == 2 else WAIT)
        host.append(env.host.optimiser.param_groups[0]["lr"])
        seed += [group["lr"] for group in env.host.optimiser.param_groups[1:]]
    # Learning rate of the host in epoch k: 0.05·(1 + cos(π·k/4))/2. The learning-rate schedule of the seed
    # starts at epoch 2, and the commit removes the seed after the last epoch.
    np.testing.assert_allclose(host, [0.05, 0.042678, 0.025, 0.007322], rtol=1e-4)
    np.testing.assert_allclose(seed, [0.05])
    with pytest.raises(RuntimeError, match=r"this episode has ended; call reset\(\)"):
        env.step(WAIT)


def test_learning_rate_of_an_incubating_seed_has_a_cosine_schedule_from_its_germination() -> None:
    rules = LifecycleRules(min_training_epochs=9)
    env, _ = started(tiny_task(horizon=8, batches_per_epoch=2, rules=rules))
    run(env, {4: plant(0)}, until=6)
    # In the second minibatch of the sixth epoch, 5.5 epochs are done; the seed's schedule from epoch 4 to 8
    # has the progress (5.5 − 4) / (8 − 4).
    rate = 0.05 * 0.5 * (1.0 + math.cos(math.pi * 1.5 / 4.0))
    assert env.model.groups.own_group(0)["lr"] == pytest.approx(rate)  # type: ignore[union-attr]


def test_learning_rates_of_host_and_fossil_are_zero_at_the_horizon() -> None:
    env, _ = started(tiny_task(horizon=8))
    run(env, {0: plant(1), 6: action(LifecycleOp.FOSSILIZE, 1)})
    env.host._epoch = env.epoch
    env.host._before_batch(0)
    assert [group["lr"] for group in env.host.optimiser.param_groups] == [0.0, 0.0]


def test_contribution_of_a_fossil_is_no_longer_measured_after_fossil_watch_epochs() -> None:
    rules = LifecycleRules(min_training_epochs=2, fossil_watch_epochs=1)
    env, sink = started(tiny_task(horizon=12, rules=rules))
    run(env, {0: plant(1), 5: action(LifecycleOp.FOSSILIZE, 1)}, until=10)
    # The seed is fossilized before epoch 6, so it is measured once as a fossil, at epoch 6.
    assert env.table.epochs_since_measured[0, 1] == 10 - 6
    assert max(row.epoch for row in sink.of(CounterfactualRow)) == 6
