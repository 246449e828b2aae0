import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.karn.questions.episode_selection import EpisodeKey
from esper.karn.questions.slot_lanes import MARKED, Lanes, lanes
from esper.karn.run import open_run
from esper.leyline import Stage
from esper.leyline.rows import EpochRow, Row, SeedRow, TransitionRow
from tests.karn import made_run


def lanes_of(directory, rows: Sequence[Row]) -> Lanes:
    found = lanes(open_run(made_run.write(directory, rows)))
    assert found is not None
    return found


def stages_by_epoch(rows: Sequence[Row], slot: int, last: int) -> list[Stage]:
    """Return the seed stage of a slot in each epoch, by replaying the transition rows."""
    stage, found = Stage.DORMANT, []
    moves = [row for row in rows if isinstance(row, TransitionRow) and row.slot == slot]
    for epoch in range(last):
        for move in moves:
            if move.epoch == epoch:
                stage = Stage(move.to_stage)
        found.append(stage)
    return found


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), horizon=st.integers(1, 40), slots=st.integers(1, 8), full=st.booleans())
def test_slot_timeline_has_the_stages_transitions_and_alphas_of_the_telemetry_rows(
    seed, horizon, slots, full, tmp_path_factory
):
    rows = made_run.run_rows(horizon=horizon, slots=slots, seed=seed, full=full)
    found = lanes_of(tmp_path_factory.mktemp("run") / "run", rows)

    for index, lane in enumerate(found.lanes):
        drawn = [Stage.DORMANT] * horizon
        alphas: dict[int, float | None] = {}
        for span in lane.spans:
            assert len(span.alphas) == span.end - span.start > 0
            for epoch, alpha in zip(range(span.start, span.end), span.alphas, strict=True):
                # The time spans of two stages of one slot do not overlap.
                assert drawn[epoch] is Stage.DORMANT
                drawn[epoch] = span.stage
                alphas[epoch] = alpha
        assert drawn == stages_by_epoch(rows, index, horizon)
        moves = [row for row in rows if isinstance(row, TransitionRow) and row.slot == index]
        marked = [(move.to_stage, move.epoch) for move in moves if move.to_stage in MARKED]
        assert [(mark.to_stage, mark.epoch) for mark in lane.marks] == marked
        recorded = {row.epoch: row.alpha for row in rows if isinstance(row, SeedRow) and row.slot == index}
        assert all(alphas[epoch] == alpha for epoch, alpha in recorded.items() if epoch in alphas)
        if not full:
            assert set(alphas.values()) <= {None}


def test_slot_timeline_has_the_scores_and_twin_scores_of_the_epoch_rows(tmp_path):
    rows = made_run.run_rows()
    found = lanes_of(tmp_path / "run", rows)

    epochs = [row for row in rows if isinstance(row, EpochRow)]
    assert [place.last for place in found.scores.bins] == [row.epoch for row in epochs]
    assert found.scores["score"] == [row.val_score for row in epochs]
    assert found.scores["twin"] == [row.twin_score for row in epochs]


def test_slot_timeline_shows_the_last_measured_contribution_of_a_seed(tmp_path):
    rows = made_run.run_rows(seed=3)
    found = lanes_of(tmp_path / "run", rows)
    last = {row.seed: row for row in rows if isinstance(row, SeedRow) and row.contribution is not None}
    seeds = [seed for lane in found.lanes for seed in lane.seeds if seed.seed in last]

    assert seeds
    for seed in seeds:
        row, columns = last[seed.seed], ("contribution", "contribution_error", "params")
        assert [getattr(seed, name) for name in columns] == [getattr(row, name) for name in columns]


def test_slot_timeline_of_an_unfinished_episode_ends_at_its_last_epoch(tmp_path):
    rows = [made_run.run_row(), *made_run.Episode(0, 0, 3, 20, random.Random(5)).live(epochs=9)]
    found = lanes_of(tmp_path / "run", rows)

    assert (found.epoch, found.horizon) == (9, 20)
    assert max(span.end for lane in found.lanes for span in lane.spans) == 9
    alive = [seed for lane in found.lanes for seed in lane.seeds if seed.fate == "alive"]
    assert alive
    assert {seed.end for seed in alive} == {9}


def test_slot_timeline_without_epoch_rows_has_no_scores(tmp_path):
    rows = [row for row in made_run.run_rows() if not isinstance(row, EpochRow | SeedRow)]
    found = lanes_of(tmp_path / "run", rows)

    assert found.scores is None
    assert any(lane.spans for lane in found.lanes)


@pytest.mark.parametrize("episode", [None, EpisodeKey(0, 7)])
def test_episode_without_rows_has_no_slot_timeline(tmp_path, episode):
    assert lanes(open_run(made_run.write(tmp_path / "run", [made_run.run_row()])), episode) is None
