"""Telemetry rows that an episode emits."""

from esper.leyline import LEGAL_MOVES, NUM_OPS, Stage
from esper.leyline.rows import (
    CounterfactualRow,
    DecisionRow,
    EnvRow,
    EpisodeRow,
    EpochRow,
    SeedRow,
    TransitionRow,
)
from tests.tolaria.building import PLAN, WAIT, plant, run, started, tiny_task


def test_episode_emits_telemetry_rows_of_every_kind_with_consistent_values() -> None:
    env, sink = started(tiny_task(horizon=12))
    run(env, PLAN)
    report = env.finish()
    kinds = {type(row) for row in sink.rows}
    assert kinds == {EpochRow, SeedRow, TransitionRow, DecisionRow, CounterfactualRow, EpisodeRow}
    assert all(0 <= row.epoch <= 12 and (row.env, row.episode) == (0, 0) for row in sink.of(EnvRow))

    epochs = sink.of(EpochRow)
    assert [row.epoch for row in epochs] == list(range(1, 13))
    for row in epochs:
        assert row.params == row.grown_params + 106
        assert 0.0 < row.learning_rate <= 0.05
        assert row.twin_score is None
    for seed in sink.of(SeedRow):
        assert (seed.contribution is None) == (seed.freshness == 0.0)
        assert seed.age <= seed.epoch
    assert all(Stage(m.to_stage) in LEGAL_MOVES[Stage(m.from_stage)] for m in sink.of(TransitionRow))
    assert [row.forced for row in sink.of(DecisionRow)][:2] == [False, False]

    [episode] = sink.of(EpisodeRow)
    assert episode.val_score == report.val_score == epochs[-1].val_score
    assert sum(episode.op_counts) == 12
    assert len(episode.op_counts) == NUM_OPS
    assert episode.refused == 0
    assert episode.ended_by == "horizon"
    assert [purpose for purpose, flops in episode.flops.items() if flops == 0] == ["race"]


def test_transition_row_has_the_validation_score_before_the_stage_move() -> None:
    env, sink = started(tiny_task(horizon=8))
    scores = {0: env._val_scores[0]}
    for epoch in range(7):
        scores[epoch + 1] = env.step(plant(1) if epoch == 0 else WAIT).val_score
    # The row of a stage move by an action has the score of the previous epoch; that of an automatic move has
    # the score of its own epoch.
    assert [(row.epoch, row.score) for row in sink.of(TransitionRow)] == [
        (0, scores[0]),
        (0, scores[0]),
        (2, scores[2]),
        (5, scores[5]),
    ]


def test_decision_row_is_marked_forced_if_only_wait_is_legal_and_epoch_rows_have_the_twin_score() -> None:
    env, sink = started(tiny_task((2,), horizon=5))
    env.reset(twin_scores=[10.0, 11.0, 12.0, 13.0, 14.0, 15.0])
    run(env, {0: plant(0)}).finish()
    # Germination is legal at first; then WAIT is the only legal action until the seed is three epochs old.
    assert [row.forced for row in sink.of(DecisionRow)] == [False, True, True, False, False]
    assert [row.twin_score for row in sink.of(EpochRow)] == [11.0, 12.0, 13.0, 14.0, 15.0]
    assert sink.of(EpisodeRow)[0].twin_val_score == 15.0
