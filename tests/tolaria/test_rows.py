"""The rows that an episode emits."""

from __future__ import annotations

from esper.leyline import NUM_OPS, Stage, is_legal_move
from esper.leyline.events import (
    CounterfactualRow,
    DecisionRow,
    EnvRow,
    EpisodeRow,
    EpochRow,
    SeedRow,
    TransitionRow,
)
from tests.tolaria.building import PLAN, SMALL_RULES, WAIT, plant, run, started, take, tiny_task


def test_every_row_is_emitted_and_every_value_is_within_its_range() -> None:
    env, sink = started(tiny_task(horizon=12))
    run(env, PLAN)
    report = env.finish()
    kinds = {type(row) for row in sink.rows}
    assert kinds == {EpochRow, SeedRow, TransitionRow, DecisionRow, CounterfactualRow, EpisodeRow}
    assert all(0 <= row.epoch <= 12 and (row.env, row.episode) == (0, 0) for row in sink.of(EnvRow))

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
    scores = {0: env._val_scores[0]}
    for epoch in range(7):
        scores[epoch + 1] = take(env, plant(1) if epoch == 0 else WAIT).val_score
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
    env.reset(twin_scores=[10.0, 11.0, 12.0, 13.0])
    run(env, {})
    env.finish()
    assert [row.twin_score for row in sink.of(EpochRow)] == [11.0, 12.0, 13.0]
    assert sink.of(EpisodeRow)[0].twin_val_score == 13.0
