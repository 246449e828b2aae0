import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from esper.kasmina.blueprints import blueprint_named
from esper.leyline import (
    NUM_OPS,
    Blueprint,
    EpochFacts,
    LifecycleRules,
    Op,
    Row,
    Stage,
    is_legal_move,
)
from esper.leyline.errors import DataError, InvalidActionError
from esper.leyline.events import (
    CounterfactualRow,
    DecisionRow,
    EpisodeRow,
    EpochRow,
    LifeRow,
    SeedRow,
    TransitionRow,
)
from esper.leyline.slot_table import IntArray
from esper.tolaria import snapshot
from esper.tolaria.env import MorphEnv
from esper.tolaria.objective import CLASSIFICATION
from esper.tolaria.tasks import TaskSpec
from esper.tolaria.vector import SerialVector
from tests.contracts.matrix import registered
from tests.tolaria.building import (
    SMALL_RULES,
    WAIT,
    ListSink,
    action,
    bits,
    host_bits,
    noisy_task,
    plant,
    run,
    stages_of,
    started,
    stir,
    tiny_task,
)

PLAN = {
    0: plant(1, Blueprint.CONV_HEAVY),
    1: plant(0, Blueprint.DEPTHWISE),
    3: plant(2, Blueprint.NORM),
    6: action(Op.FOSSILIZE, 1),
    8: action(Op.PRUNE, 0, alpha_speed=1),
}
"""One seed becomes permanent, one is ramped out, one is held."""


def timeless(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain maps without what a clock measured."""
    maps = [{"table": type(row).__name__, **msgspec.structs.asdict(row)} for row in rows]
    return [{k: v for k, v in row.items() if k not in ("t", "ms", "phase_ms", "seconds")} for row in maps]


def rows_of_env(sink: ListSink, env: int) -> list[dict[str, Any]]:
    return timeless([row for row in sink.rows if isinstance(row, LifeRow) and row.env == env])


# --- reproducibility -------------------------------------------------------------------------------


@pytest.mark.parametrize("make_task", [tiny_task, noisy_task])
def test_the_same_rng_seed_gives_the_same_run_bit_for_bit(make_task: Callable[..., TaskSpec]) -> None:
    lives = []
    for _ in range(2):
        env, sink = started(make_task(horizon=12))
        facts = [bits(asdict(env.step(PLAN.get(epoch, WAIT)))) for epoch in range(12)]
        torch.rand(7)  # whatever others draw from the global generator in between
        lives.append((facts, bits(snapshot.take(env)), bits(asdict(env.finish())), timeless(sink.rows)))
    assert lives[0] == lives[1]


def test_a_life_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    env, _ = started(noisy_task(horizon=8))
    run(env, PLAN).finish()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("change", [{"rng_seed": 1}, {"env": 1}])
def test_another_rng_seed_or_environment_is_another_life(change: dict[str, int]) -> None:
    env, _ = started()
    other, _ = started(**change)
    assert host_bits(env) != host_bits(other)


def test_another_episode_is_another_life_and_a_repeated_one_the_same() -> None:
    env, _ = started()
    first = host_bits(run(env, PLAN, until=5))
    env.reset(1)
    assert host_bits(run(env, PLAN, until=5)) != first
    env.reset(0)
    assert host_bits(run(env, PLAN, until=5)) == first


def run_vector(env_indices: Sequence[int], growing: Sequence[int]) -> tuple[SerialVector, ListSink, Any]:
    """Ten epochs in which the environments named in ``growing`` follow the plan and the others wait."""
    sink = ListSink()
    vector = SerialVector(noisy_task(horizon=10), rng_seed=3, env_indices=env_indices, sink=sink)
    history = [vector.reset()]
    for epoch in range(10):
        rows = [PLAN.get(epoch, WAIT) if env in growing else WAIT for env in env_indices]
        history.append(vector.step(np.stack(rows)))
    vector.finish()
    return vector, sink, history


def facts_of_row(history: list[EpochFacts], row: int) -> Any:
    return bits([{name: values[row] for name, values in asdict(facts).items()} for facts in history])


def life_of(vector: SerialVector, sink: ListSink, history: list[EpochFacts], env: int) -> Any:
    row = [e.env for e in vector.envs].index(env)
    return bits(snapshot.take(vector.envs[row])), facts_of_row(history, row), rows_of_env(sink, env)


def test_the_growth_of_one_environment_changes_nothing_in_another() -> None:
    bare = run_vector(range(5), growing=[])
    grown = run_vector(range(5), growing=[3])
    assert life_of(*bare, env=4) == life_of(*grown, env=4)
    assert life_of(*bare, env=3) != life_of(*grown, env=3)


def test_the_number_of_environments_changes_nothing_in_any_of_them() -> None:
    among_five = run_vector(range(5), growing=[1, 2, 4])
    alone = run_vector([2], growing=[2])
    assert life_of(*among_five, env=2) == life_of(*alone, env=2)


# --- the line of a step ----------------------------------------------------------------------------


def test_a_seed_s_life_epoch_by_epoch() -> None:
    env, _ = started(tiny_task(horizon=12))
    lines = []
    for epoch in range(7):
        env.step(plant(1) if epoch == 0 else WAIT)
        table = env.table
        alpha = round(float(table.alpha[0, 1]), 3)
        lines.append(
            (
                Stage(int(table.stage[0, 1])).name,
                int(table.age[0, 1]),
                int(table.epochs_in_stage[0, 1]),
                alpha,
            )
        )
    # Two epochs of incubation, one epoch each at a third, two thirds and all of alpha, then held.
    assert lines == [
        ("TRAINING", 1, 1, 0.0),
        ("BLENDING", 2, 0, 0.333),
        ("BLENDING", 3, 1, 0.667),
        ("BLENDING", 4, 2, 1.0),
        ("HOLDING", 5, 0, 1.0),
        ("HOLDING", 6, 1, 1.0),
        ("HOLDING", 7, 2, 1.0),
    ]


def test_reset_validates_the_untrained_host_and_knows_nothing_of_training() -> None:
    env = MorphEnv(tiny_task(), rng_seed=0)
    facts = env.reset()
    assert (facts.epoch, facts.last_op, facts.last_success, facts.ended) == (0, Op.WAIT, True, False)
    assert math.isnan(facts.train_loss)
    assert math.isnan(facts.host_gradient_norm)
    assert 0.0 <= facts.val_score <= 100.0
    assert facts.val_loss > 0.0
    # Host 2-4-4 with 1×1 kernels: (2+2) + (8+4) + (16+4), GroupNorm 2·(2+4+4), head 40+10.
    assert (facts.params, facts.grown_params, facts.param_budget) == (106, 0, 20 * 106)


def test_a_step_after_the_horizon_is_refused() -> None:
    env, _ = started(tiny_task(horizon=2))
    run(env, {})
    with pytest.raises(RuntimeError, match=r"this life has ended; call reset\(\)"):
        env.step(WAIT)


def test_learning_rates_fall_to_zero_at_the_horizon_each_on_its_own_clock() -> None:
    env, _ = started(tiny_task(horizon=4, rules=LifecycleRules(min_training_epochs=9)))
    host, seed = [], []
    for epoch in range(4):
        env.step(plant(0) if epoch == 2 else WAIT)
        host.append(env.optimiser.param_groups[0]["lr"])
        optimiser = env.model.slot(0).optimiser
        if optimiser is not None:
            seed.append(optimiser.param_groups[0]["lr"])
    # 0.05·(1 + cos(pi·k/4))/2 for the host; the seed is born at 2 and has two epochs of its own, of
    # which the commit leaves it the first.
    np.testing.assert_allclose(host, [0.05, 0.042678, 0.025, 0.007322], rtol=1e-4)
    np.testing.assert_allclose(seed, [0.05])


@pytest.mark.parametrize("incubation", ["shadow", "straight_through"])
def test_a_seed_s_rate_follows_its_own_clock_while_it_incubates(incubation: str) -> None:
    rules = LifecycleRules(min_training_epochs=9, incubation=incubation)  # type: ignore[arg-type]
    env, _ = started(tiny_task(horizon=8, batches_per_epoch=2, rules=rules))
    run(env, {4: plant(0)}, until=6)
    # Second minibatch of the sixth epoch: (5.5 − 4) / (8 − 4) of the seed's life.
    rate = 0.05 * 0.5 * (1.0 + math.cos(math.pi * 1.5 / 4.0))
    assert env.model.slot(0).optimiser.param_groups[0]["lr"] == pytest.approx(rate)  # type: ignore[union-attr]


def test_the_rate_at_the_horizon_itself_is_zero_for_host_and_fossils() -> None:
    env, _ = started(tiny_task(horizon=8))
    run(env, {0: plant(1), 6: action(Op.FOSSILIZE, 1)})
    env.before_batch(0)
    assert env.optimiser.param_groups[0]["lr"] == 0.0
    assert env.model.slot(1).optimiser.param_groups[0]["lr"] == 0.0  # type: ignore[union-attr]


def test_an_old_fossil_counts_as_host() -> None:
    rules = LifecycleRules(min_training_epochs=2, fossil_watch_epochs=1)
    env, sink = started(tiny_task(horizon=12, rules=rules))
    run(env, {0: plant(1), 5: action(Op.FOSSILIZE, 1)}, until=10)
    # Fossilized before epoch 6, so it is watched at age 1 in that stage and never after.
    assert env.table.epochs_since_measured[0, 1] == 10 - 6
    assert max(row.epoch for row in sink.of(CounterfactualRow)) == 6


# --- the commit ------------------------------------------------------------------------------------


def test_the_horizon_keeps_held_seeds_and_removes_every_other_live_one() -> None:
    env, sink = started(tiny_task((2, 4, 4, 4), horizon=7))
    # One blends, one is held, one incubates, one was never planted.
    run(env, {0: plant(1), 3: plant(0)}, until=6)
    env.step(plant(2))
    assert stages_of(env) == [Stage.EMBARGOED, Stage.FOSSILIZED, Stage.EMBARGOED, Stage.DORMANT]
    assert [env.model.slot(i).seed is None for i in range(4)] == [True, False, True, True]
    last = [row for row in sink.of(TransitionRow) if row.epoch == 7 and row.to_stage != Stage.EMBARGOED]
    assert [(row.slot, Stage(row.from_stage).name, Stage(row.to_stage).name) for row in last] == [
        (0, "BLENDING", "PRUNED"),
        (1, "HOLDING", "FOSSILIZED"),
        (2, "TRAINING", "PRUNED"),
    ]
    assert {row.cause for row in last} == {"mechanical"}
    assert last[0].reason == "not held at the horizon"


def test_a_held_seed_that_fails_its_gate_at_the_horizon_is_removed_and_the_row_says_why() -> None:
    rules = LifecycleRules(min_training_epochs=2, strict_fossilize=True, min_contribution=100.0)
    env, sink = started(tiny_task(horizon=6, rules=rules))
    run(env, {0: plant(1)})
    assert stages_of(env)[1] == Stage.EMBARGOED
    [row] = [row for row in sink.of(TransitionRow) if row.to_stage == Stage.PRUNED]
    assert row.reason == "refused by G5 at the horizon: contribution_lower_bound"


def test_the_final_score_is_the_committed_network_s() -> None:
    env, sink = started(tiny_task(horizon=7))
    run(env, {0: plant(1), 3: plant(0)}, until=6)
    stir(env.model.slot(0), scale=1.0)
    with pytest.raises(DataError, match="before the network was committed"):
        env.finish()
    facts = env.step(WAIT)
    report = env.finish()

    validation = env.splits.validation
    with torch.no_grad():
        committed = env.model.eval()(validation.x)
    right = (committed.argmax(dim=1) == validation.y).float().mean().item()
    assert report.val_score == facts.val_score == pytest.approx(100.0 * right)
    assert facts.val_loss == pytest.approx(CLASSIFICATION.loss(committed, validation.y).item())
    last = [row for row in sink.of(CounterfactualRow) if row.epoch == 7]
    assert [row.on for row in last] == [[False, False, False], [False, True, False]]
    assert last[-1].loss == pytest.approx(facts.val_loss), "the rows are the committed network's, once"
    (removed,) = [row for row in sink.of(TransitionRow) if row.to_stage == Stage.PRUNED]
    assert removed.slot == 0, "a live seed was in the forward pass until the commit"
    assert report.val_scores[-1] == report.val_score
    assert len(report.val_scores) == 8, "the untrained host and seven epochs"
    assert report.params == facts.params == sum(p.numel() for p in env.model.parameters())
    assert 0.0 <= report.test_score <= 100.0
    with pytest.raises(DataError, match="read twice"):
        env.finish()


def test_nothing_but_the_commit_unlocks_the_test_part() -> None:
    env, _ = started(tiny_task(horizon=3))
    for _ in range(2):
        env.step(WAIT)
        with pytest.raises(DataError, match="before the network was committed"):
            env.splits.test.read()
    env.step(WAIT)
    assert len(env.splits.test.read()) == 48


# --- what goes wrong -------------------------------------------------------------------------------


def poison(env: MorphEnv, slot: int, value: float = math.nan) -> None:
    with torch.no_grad():
        weight = next(env.model.slot(slot).parameters())
        weight[(0,) * weight.ndim] = value


def governed(sink: ListSink) -> list[TransitionRow]:
    return [row for row in sink.of(TransitionRow) if row.cause == "governor"]


@pytest.mark.parametrize("incubation", ["shadow", "straight_through"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_incubating_seed_is_removed_and_the_host_never_notices(
    value: float, incubation: str
) -> None:
    rules = LifecycleRules(min_training_epochs=9, embargo_epochs=2, incubation=incubation)  # type: ignore[arg-type]
    task = tiny_task(batches_per_epoch=3, rules=rules)
    (env, sink), (twin, _) = started(task), started(task)
    run(env, {0: plant(1, Blueprint.CONV_HEAVY)}, until=2)
    poison(env, 1, value)
    for epoch in (3, 4, 5):
        assert env.step(WAIT).epoch == epoch
    run(twin, {}, until=5)
    assert host_bits(env) == host_bits(twin)
    [row] = governed(sink)
    assert (row.epoch, row.slot, row.from_stage, row.to_stage) == (2, 1, Stage.TRAINING, Stage.PRUNED)
    assert row.reason == "non-finite while incubating"
    assert stages_of(env)[1] == Stage.DORMANT, "two epochs of embargo and one of cleaning up"
    assert [row.skipped_batches for row in sink.of(EpochRow)] == [0] * 5


def test_a_straight_through_seed_whose_gradient_overflows_is_removed_and_the_host_never_notices() -> None:
    rules = LifecycleRules(min_training_epochs=9, incubation="straight_through")
    (env, sink), (twin, _) = started(tiny_task(rules=rules)), started(tiny_task(rules=rules))
    run(env, {0: plant(1, Blueprint.CONV_HEAVY)}, until=2)
    with torch.no_grad():
        env.model.slot(1).seed.one[2].weight.fill_(1e30)  # type: ignore[index,operator,union-attr]
    env.step(WAIT)
    run(twin, {}, until=3)
    assert [row.reason for row in governed(sink)] == ["non-finite while incubating"]
    assert host_bits(env) == host_bits(twin)


def test_a_broken_blended_seed_costs_one_minibatch_and_is_removed() -> None:
    env, sink = started(tiny_task(batches_per_epoch=3))
    run(env, {0: plant(1, Blueprint.CONV_HEAVY), 1: plant(0)}, until=4)
    assert stages_of(env)[:2] == [Stage.BLENDING, Stage.BLENDING]
    poison(env, 1)
    facts = env.step(WAIT)
    [row] = governed(sink)
    assert (row.slot, row.to_stage, row.reason) == (1, Stage.PRUNED, "non-finite while blended")
    assert sink.of(EpochRow)[-1].skipped_batches == 1
    assert stages_of(env)[:2] == [Stage.BLENDING, Stage.EMBARGOED]
    assert all(torch.isfinite(p).all() for p in env.model.parameters())
    assert math.isfinite(facts.val_loss)
    assert math.isfinite(facts.train_loss)


def test_a_seed_whose_gradient_overflows_is_blamed_alone() -> None:
    env, sink = started(tiny_task(batches_per_epoch=2))
    run(env, {0: plant(2), 1: plant(1)}, until=5)
    with torch.no_grad():
        env.model.slot(2).seed[0].bias.fill_(1e25)  # type: ignore[index,operator,union-attr]
    env.step(WAIT)
    # Loss and logits stay finite; the head's gradient does not, and does without this seed.
    assert [(row.slot, row.to_stage) for row in governed(sink)] == [(2, Stage.PRUNED)]
    assert stages_of(env)[1] == Stage.HOLDING, "it went on as if nothing had happened"
    assert all(torch.isfinite(p).all() for p in env.model.parameters())


# --- actions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "illegal",
    [
        plant(1),
        action(Op.SET_ALPHA_TARGET, 1),
        action(Op.FOSSILIZE, 1),
        action(Op.PRUNE, 0),
        action(Op.ADVANCE, 1),
        action(Op.PRUNE, 1),
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
    assert decision.failed_checks == [Op(int(illegal[0])).name.lower()]
    assert (facts.last_op, facts.last_success) == (illegal[0], False)
    assert bits(env.model.state()) == bits(twin.model.state())
    assert facts.val_loss == expected.val_loss
    assert env.refused == 1


def test_a_gate_refuses_by_name() -> None:
    env, sink = started()
    env.step(plant(0, Blueprint.LORA))
    decision = sink.of(DecisionRow)[-1]
    assert (decision.succeeded, decision.refused_by) == (False, "G0")
    assert decision.failed_checks == ["blueprint_selectable"]
    assert stages_of(env) == [Stage.DORMANT] * 3


def test_a_blueprint_that_a_slot_is_too_narrow_for_is_refused_and_the_life_goes_on() -> None:
    # Slots of the tiny host are 2, 4 and 4 wide.
    light = blueprint_named("conv_light", "feature_map").build
    with registered("fours", light, multiple_of=4):
        fours = Blueprint(blueprint_named("fours", "feature_map").index)
        (env, sink), (twin, _) = started(), started()
        facts, expected = env.step(plant(0, fours)), twin.step(WAIT)
        decision = sink.of(DecisionRow)[-1]
        assert (decision.succeeded, decision.refused_by) == (False, "G0")
        assert decision.failed_checks == ["blueprint_fits"]
        assert (facts.val_loss, facts.last_success) == (expected.val_loss, False)
        assert bits(env.model.state()) == bits(twin.model.state())
        env.step(plant(1, fours))
        assert stages_of(env) == [Stage.DORMANT, Stage.TRAINING, Stage.DORMANT]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (action(Op.WAIT, 3), "head slot of environment 0 has value 3; allowed are 0 to 2"),
        (action(Op.GERMINATE, 0, blueprint=13), "head blueprint of environment 0 has value 13"),
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
    assert env.table.enabled.tolist() == [[False, True, True]], "the next life keeps it disabled"


# --- rows ------------------------------------------------------------------------------------------


def test_every_row_is_emitted_and_every_value_is_within_its_range() -> None:
    env, sink = started(tiny_task(horizon=12))
    run(env, PLAN)
    report = env.finish()
    kinds = {type(row) for row in sink.rows}
    assert kinds == {EpochRow, SeedRow, TransitionRow, DecisionRow, CounterfactualRow, EpisodeRow}
    assert all(0 <= row.epoch <= 12 and (row.env, row.episode) == (0, 0) for row in sink.of(LifeRow))

    epochs = sink.of(EpochRow)
    assert [row.epoch for row in epochs] == list(range(1, 13))
    for row in epochs:
        assert 0.0 <= row.val_score <= 100.0
        assert row.train_score is not None
        assert 0.0 <= row.train_score <= 100.0
        assert row.val_loss > 0.0
        assert row.params == row.grown_params + 106
        assert 0.0 < row.learning_rate <= 0.05
        assert row.twin_score is None
        assert row.ms > 0.0

    for seed in sink.of(SeedRow):
        assert 0.0 <= seed.alpha <= 1.0
        assert 0.0 <= seed.freshness <= 1.0
        assert seed.gradient_health is None or 0.0 <= seed.gradient_health <= 1.0
        assert seed.contribution is None or -100.0 <= seed.contribution <= 100.0
        assert seed.contribution_error is None or 0.0 <= seed.contribution_error <= 50.0
        assert (seed.contribution is None) == (seed.freshness == 0.0)
        assert seed.params > 0
        assert seed.age <= seed.epoch

    for move in sink.of(TransitionRow):
        assert is_legal_move(Stage(move.from_stage), Stage(move.to_stage))
        assert move.reason
        assert move.score is not None
    for decision in sink.of(DecisionRow):
        assert (len(decision.action), len(decision.read)) == (8, 8)
        assert decision.succeeded == (decision.refused_by is None)
    assert [row.forced for row in sink.of(DecisionRow)][:2] == [False, False]

    for scored in sink.of(CounterfactualRow):
        assert len(scored.on) == 3
        assert 0.0 <= scored.score <= 100.0

    [episode] = sink.of(EpisodeRow)
    assert 0.0 <= episode.test_score <= 100.0
    assert episode.val_score == report.val_score == epochs[-1].val_score
    assert sum(episode.op_counts) == 12
    assert len(episode.op_counts) == NUM_OPS
    assert episode.refused == 0
    assert episode.ended_by == "horizon"
    assert min(episode.flops.values()) > 0


def test_a_move_carries_the_score_last_measured() -> None:
    env, sink = started(tiny_task(horizon=8))
    scores = {0: env.val_scores[0]}
    for epoch in range(7):
        scores[epoch + 1] = env.step(plant(1) if epoch == 0 else WAIT).val_score
    # A move before an epoch's training has the score of the epoch before, one after it its own.
    assert [(row.epoch, row.score) for row in sink.of(TransitionRow)] == [
        (0, scores[0]),
        (0, scores[0]),
        (2, scores[2]),
        (5, scores[5]),
    ]


def test_nothing_is_forced_unless_only_waiting_is_legal() -> None:
    env, sink = started(tiny_task((2,), rules=SMALL_RULES))
    run(env, {0: plant(0)}, until=5)
    # An empty slot can be planted; then the seed is too young to prune until it is three epochs old.
    assert [row.forced for row in sink.of(DecisionRow)] == [False, True, True, False, False]


def test_the_twin_s_score_stands_beside_the_own() -> None:
    env, sink = started(tiny_task(horizon=3))
    env.twin_scores = [10.0, 11.0, 12.0, 13.0]
    run(env, {})
    env.finish()
    assert [row.twin_score for row in sink.of(EpochRow)] == [11.0, 12.0, 13.0]
    assert sink.of(EpisodeRow)[0].twin_val_score == 13.0
