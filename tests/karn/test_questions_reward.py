"""Statistics of seeds and rewards, computed from the telemetry rows of a run."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from esper.karn.questions.breakdowns import reward
from esper.karn.questions.honesty import GROUPS, MOST_EPISODES, honesty
from esper.karn.questions.worth import worth
from esper.karn.run import Run
from esper.leyline import BLUEPRINT_IDS, Stage
from esper.leyline.rows import EpisodeRow, Row, SeedRow, TransitionRow, UpdateRow
from tests.karn import made_run
from tests.karn.test_questions import of_type, opened

# --- worth ------------------------------------------------------------------------------------------


def seeds_of(rows: Sequence[Row]) -> dict[tuple[int, int, int], list[TransitionRow]]:
    found: dict[tuple[int, int, int], list[TransitionRow]] = {}
    for row in of_type(rows, TransitionRow):
        if row.seed >= 0:
            found.setdefault((row.env, row.episode, row.seed), []).append(row)
    return found


def test_number_of_seeds_per_stage_counts_each_seed_once_in_every_stage_it_reached(training, training_rows):
    reached: dict[str, Counter[Stage]] = {}
    for moves in seeds_of(training_rows).values():
        counter = reached.setdefault(BLUEPRINT_IDS[moves[0].blueprint], Counter())
        counter.update({Stage(move.to_stage) for move in moves})

    found = worth(training)
    assert {one.blueprint for one in found} == set(reached)
    for one in found:
        counts = reached[one.blueprint]
        assert one.germinated == counts[Stage.GERMINATED]
        assert (one.blended, one.held) == (counts[Stage.BLENDING], counts[Stage.HOLDING])
        assert (one.fossilized, one.pruned) == (counts[Stage.FOSSILIZED], counts[Stage.PRUNED])
        assert one.germinated >= one.blended >= one.held >= one.fossilized


def test_mean_contribution_of_a_blueprint_uses_the_last_measurement_of_every_seed(training, training_rows):
    last: dict[tuple[int, int, int], SeedRow] = {}
    for row in of_type(training_rows, SeedRow):
        if row.contribution is not None:
            last[row.env, row.episode, row.seed] = row
    moved = {
        key: next((move.contribution for move in reversed(moves) if move.contribution is not None), None)
        for key, moves in seeds_of(training_rows).items()
        if key not in last
    }
    for one in worth(training):
        rows = [row for row in last.values() if BLUEPRINT_IDS[row.blueprint] == one.blueprint]
        others = [
            value
            for key, value in moved.items()
            if value is not None and BLUEPRINT_IDS[seeds_of(training_rows)[key][0].blueprint] == one.blueprint
        ]
        points = [row.contribution for row in rows] + others
        assert one.measured == len(points)
        assert one.contribution == pytest.approx(np.mean(points))
        if not others and len(points) > 1:
            assert one.contribution_error == pytest.approx(np.std(points, ddof=1) / np.sqrt(len(points)))
            assert one.per_thousand == pytest.approx(1000 * sum(points) / sum(row.params for row in rows))


def test_mean_contribution_over_a_single_seed_has_the_standard_error_of_that_seeds_measurement(tmp_path):
    rows = made_run.run_rows(horizon=12, slots=1, seed=4)
    measured = [row for row in of_type(rows, SeedRow) if row.contribution is not None][-1]
    rows = [row for row in rows if getattr(row, "seed", measured.seed) in (measured.seed, -1)]
    (one,) = worth(opened(tmp_path, rows))

    assert one.contribution == measured.contribution
    assert one.contribution_error == measured.contribution_error
    assert one.per_thousand == pytest.approx(1000 * measured.contribution / measured.params)
    assert one.per_thousand_error == pytest.approx(1000 * measured.contribution_error / measured.params)


def test_blueprint_parameter_counts_are_unknown_without_seed_rows(tmp_path):
    rows = made_run.training_rows(iterations=1, envs=4, full=False)
    for one in worth(opened(tmp_path, rows)):
        assert one.params is one.per_thousand is one.per_thousand_error is None


def test_blueprint_statistics_are_none_if_no_seed_germinated(tmp_path):
    assert worth(opened(tmp_path, [made_run.run_row()])) is None


# --- reward -----------------------------------------------------------------------------------------


def test_reward_series_has_the_reward_terms_of_the_update_rows_and_their_sum(training, training_rows):
    found = reward(training)

    for at, update in enumerate(of_type(training_rows, UpdateRow)):
        terms = {name: values[at] for name, values in found.values.items()}
        assert terms == {**update.reward_terms, "return": pytest.approx(sum(update.reward_terms.values()))}


def rewarded_episodes(tmp_path: Path, pairs: Sequence[tuple[float, float]], twin: float | None = None) -> Run:
    rows = made_run.training_rows(iterations=1, envs=len(pairs), horizon=1, slots=1)
    ends = iter(pairs)
    return opened(
        tmp_path,
        [
            replace(
                row, **dict(zip(("total_reward", "val_score"), next(ends), strict=True)), twin_val_score=twin
            )
            if isinstance(row, EpisodeRow)
            else row
            for row in rows
        ],
    )


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(1, 10), (2, 20), (9, 21)], 1.0),
        ([(1, 30), (2, 20), (3, 10)], -1.0),
        # The ranks 1.5 1.5 3 4 and 2 3 4 1 have rank correlation −1.5 / √(4.5 · 5): sum of products of
        # deviations, divided by the root of the product of the sums of squares.
        ([(1, 10), (1, 20), (2, 30), (3, 5)], -1.5 / (4.5 * 5) ** 0.5),
        ([(1, 10), (2, 10), (3, 10)], None),
        ([(1, 10), (2, 20)], None),
    ],
)
def test_rank_correlation_of_return_and_score_equals_a_value_derived_by_hand(tmp_path, pairs, expected):
    found = honesty(rewarded_episodes(tmp_path, pairs))

    assert found.rank_correlation == (None if expected is None else pytest.approx(expected))
    assert [(group.median_return, group.median) for group in found.groups] == sorted(pairs)


def test_chart_of_return_and_score_merges_more_than_160_episodes_into_bins_by_return(tmp_path):
    pairs = [(0.01 * index, float(index % 90)) for index in range(MOST_EPISODES + 40)]
    found = honesty(rewarded_episodes(tmp_path, pairs))

    assert (len(found.groups), found.episodes) == (GROUPS, 200)
    assert sum(group.episodes for group in found.groups) == 200
    assert found.groups[0].episodes == 5
    assert found.groups[0].median == 2.0
    assert all(one.high <= other.low for one, other in zip(found.groups, found.groups[1:], strict=False))
