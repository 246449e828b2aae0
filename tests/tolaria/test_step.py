"""One step of an episode: what happens in which order, and on which clock."""

import math
from dataclasses import replace

import numpy as np
import pytest

from esper.leyline import AlphaSpeed, AlphaTarget, LifecycleOp, LifecycleRules, Stage
from esper.leyline.rows import CounterfactualRow, DecisionRow
from esper.tolaria.env import MorphEnv
from tests.tolaria.building import SMALL_RULES, WAIT, action, plant, run, stages_of, started, tiny_task


def test_a_seed_s_episode_epoch_by_epoch_then_down_and_up_again_by_action() -> None:
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
    # Two epochs of incubation, one epoch each at a third, two thirds and all of alpha, then held. Then one
    # epoch each at 0.833, 0.667 and 0.5, shown is the alpha of the next; parked; and back at once.
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


def test_without_auto_forward_a_seed_moves_by_action_only() -> None:
    env, sink = started(tiny_task(horizon=14, rules=replace(SMALL_RULES, auto_forward=False)))
    advance = action(LifecycleOp.ADVANCE, 1)
    stages = []
    for chosen in (plant(1), WAIT, advance, advance, advance):
        env.step(chosen)
        stages.append(stages_of(env)[1].name)
    assert stages == ["GERMINATED", "GERMINATED", "TRAINING", "TRAINING", "BLENDING"]
    # The second was refused: one epoch of two.
    found = [(row.refused_by, row.failed_checks) for row in sink.of(DecisionRow)[2:]]
    assert found == [(None, []), ("G2", ["epochs"]), (None, [])]


def test_reset_validates_the_untrained_host_and_knows_nothing_of_training() -> None:
    env = MorphEnv(tiny_task(), rng_seed=0)
    facts = env.reset()
    assert (facts.epoch, facts.last_op, facts.last_success, facts.ended) == (0, LifecycleOp.WAIT, True, False)
    assert math.isnan(facts.train_loss)
    assert math.isnan(facts.host_gradient_norm)
    assert 0.0 <= facts.val_score <= 100.0
    assert facts.val_loss > 0.0
    # Host 2-4-4 with 1×1 kernels: (2+2) + (8+4) + (16+4), GroupNorm 2·(2+4+4), head 40+10.
    assert (facts.params, facts.grown_params, facts.param_budget) == (106, 0, 20 * 106)


def test_learning_rates_fall_to_zero_at_the_horizon_each_on_its_own_clock() -> None:
    env, _ = started(tiny_task(horizon=4, rules=LifecycleRules(min_training_epochs=9)))
    host, seed = [], []
    for epoch in range(4):
        env.step(plant(0) if epoch == 2 else WAIT)
        host.append(env.host.optimiser.param_groups[0]["lr"])
        optimiser = env.model.slot(0).optimiser
        if optimiser is not None:
            seed.append(optimiser.param_groups[0]["lr"])
    # 0.05·(1 + cos(pi·k/4))/2 for the host; the seed is born at 2 and has two epochs of its own, of
    # which the commit leaves it the first.
    np.testing.assert_allclose(host, [0.05, 0.042678, 0.025, 0.007322], rtol=1e-4)
    np.testing.assert_allclose(seed, [0.05])
    with pytest.raises(RuntimeError, match=r"this episode has ended; call reset\(\)"):
        env.step(WAIT)


@pytest.mark.parametrize("incubation", ["shadow", "straight_through"])
def test_a_seed_s_rate_follows_its_own_clock_while_it_incubates(incubation: str) -> None:
    rules = LifecycleRules(min_training_epochs=9, incubation=incubation)  # type: ignore[arg-type]
    env, _ = started(tiny_task(horizon=8, batches_per_epoch=2, rules=rules))
    run(env, {4: plant(0)}, until=6)
    # Second minibatch of the sixth epoch: (5.5 − 4) / (8 − 4) of the seed's episode.
    rate = 0.05 * 0.5 * (1.0 + math.cos(math.pi * 1.5 / 4.0))
    assert env.model.slot(0).optimiser.param_groups[0]["lr"] == pytest.approx(rate)  # type: ignore[union-attr]


def test_the_rate_at_the_horizon_itself_is_zero_for_host_and_fossils() -> None:
    env, _ = started(tiny_task(horizon=8))
    run(env, {0: plant(1), 6: action(LifecycleOp.FOSSILIZE, 1)})
    env.host._epoch = env.epoch
    env.host._before_batch(0)
    for optimiser in (env.host.optimiser, env.model.slot(1).optimiser):
        assert optimiser.param_groups[0]["lr"] == 0.0  # type: ignore[union-attr]


def test_an_old_fossil_counts_as_host() -> None:
    rules = LifecycleRules(min_training_epochs=2, fossil_watch_epochs=1)
    env, sink = started(tiny_task(horizon=12, rules=rules))
    run(env, {0: plant(1), 5: action(LifecycleOp.FOSSILIZE, 1)}, until=10)
    # Fossilized before epoch 6, so it is watched at age 1 in that stage and never after.
    assert env.table.epochs_since_measured[0, 1] == 10 - 6
    assert max(row.epoch for row in sink.of(CounterfactualRow)) == 6
