import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from esper.files.writer_lock import WriterLock
from esper.karn.questions.breakdowns import choices, reward, times
from esper.karn.questions.episode_selection import (
    EpisodeKey,
    default_episode,
    episode_name,
    episodes,
    notable_episodes,
)
from esper.karn.questions.honesty import honesty
from esper.karn.questions.learning_curves import growth, improvement
from esper.karn.questions.policy_health import beyond, heads, health
from esper.karn.questions.series import MOST_POINTS
from esper.karn.questions.worth import interactions
from esper.karn.run import Run, open_run
from esper.karn.run_result import differences, verdict
from esper.karn.runs import progress
from esper.leyline import OP_NAMES
from esper.leyline.rows import CounterfactualRow, DecisionRow, EpisodeRow, EpochRow, Row, UpdateRow
from tests.karn import made_run
from tests.rows import change


def opened(tmp_path: Path, rows: Sequence[Row]) -> Run:
    return open_run(made_run.write(tmp_path / "run", rows))


def of_type(rows, row_type):
    return [row for row in rows if isinstance(row, row_type)]


def iterations_of(episodes: Sequence[EpisodeRow]) -> dict[int, list[EpisodeRow]]:
    found: dict[int, list[EpisodeRow]] = {}
    for row in episodes:
        found.setdefault(row.episode + 1, []).append(row)
    return found


# --- episodes ---------------------------------------------------------------------------------------


def test_episodes_are_sorted_by_iteration_and_environment(training, training_rows):
    found = episodes(training)

    assert [episode.key for episode in found] == [
        EpisodeKey(env, episode) for episode in range(3) for env in range(5)
    ]
    assert [episode.iteration for episode in found] == [1] * 5 + [2] * 5 + [3] * 5
    scores = {EpisodeKey(row.env, row.episode): row.val_score for row in of_type(training_rows, EpisodeRow)}
    assert all(episode.score == scores[episode.key] for episode in found)


def test_unfinished_episode_is_listed_with_its_last_score(tmp_path):
    rows = made_run.Episode(0, 0, 3, 20, random.Random(1)).live(epochs=4)
    (episode,) = episodes(opened(tmp_path, [made_run.run_row(), *rows]))

    last = of_type(rows, EpochRow)[-1]
    assert episode == (EpisodeKey(0, 0), None, last.val_score)


def test_episode_shown_by_default_is_the_best_of_a_policy_training_or_the_last_of_any_other_run(
    training, training_rows, tmp_path
):
    best = max(of_type(training_rows, EpisodeRow), key=lambda row: row.val_score)

    assert default_episode(training) == EpisodeKey(best.env, best.episode)
    assert default_episode(opened(tmp_path, made_run.run_rows(episodes=3, horizon=3))) == EpisodeKey(0, 2)


def test_episodes_selected_for_a_report_are_best_median_and_worst(training, training_rows, tmp_path):
    ranked = sorted(of_type(training_rows, EpisodeRow), key=lambda row: row.val_score)

    assert notable_episodes(training) == {
        "best": EpisodeKey(ranked[14].env, ranked[14].episode),
        "median": EpisodeKey(ranked[7].env, ranked[7].episode),
        "worst": EpisodeKey(ranked[0].env, ranked[0].episode),
    }
    two = opened(tmp_path, made_run.run_rows(episodes=2, horizon=3))
    assert set(notable_episodes(two)) == {"best", "worst"}


def test_second_attempt_of_an_episode_has_the_iteration_of_the_first_attempt(tmp_path):
    rows = [
        replace(row, attempt=1)
        if getattr(row, "env", None) == 1 and getattr(row, "episode", None) == 1
        else row
        for row in made_run.training_rows(iterations=2, envs=2, horizon=3)
    ]
    run = opened(tmp_path, rows)

    assert [episode.iteration for episode in episodes(run)] == [1, 1, 2, 2]
    assert growth(run)["episodes"] == (2, 2)
    assert episode_name(run, EpisodeKey(1, 1, 1)) == "iteration 2, environment 1, attempt 2"


# --- progress ---------------------------------------------------------------------------------------


def test_progress_is_counted_in_iterations_for_a_policy_training_and_in_epochs_for_other_runs(
    training, tmp_path
):
    trained = progress(training)
    grown = progress(opened(tmp_path, made_run.run_rows(horizon=7)))

    assert (trained.unit, trained.done, trained.total, trained.state) == ("iteration", 3, 3, "finished")
    assert (grown.unit, grown.done, grown.total, grown.share) == ("epoch", 7, 7, 1.0)


def test_remaining_time_is_known_only_while_the_run_is_in_progress(tmp_path):
    rows = [made_run.run_row(), *made_run.Episode(0, 0, 3, 20, random.Random(1)).live(epochs=5)]
    run = opened(tmp_path, rows)

    stopped = progress(run)
    lock = WriterLock(run.path / "telemetry")
    running = progress(run)
    lock.release()

    assert (stopped.state, stopped.seconds_left) == ("stopped", None)
    # With 5 of 20 epochs done, the remaining time is three times the elapsed time.
    assert (running.state, running.seconds_left) == ("running", pytest.approx(3 * running.seconds))
    assert running.steps_per_second == pytest.approx(5 / running.seconds)


def test_progress_of_a_run_without_epoch_rows_is_zero(tmp_path):
    found = progress(opened(tmp_path, [made_run.run_row()]))

    assert (found.done, found.share) == (0, 0.0)
    assert found.seconds_left is found.steps_per_second is None


# --- growth -----------------------------------------------------------------------------------------


def test_score_series_of_a_policy_training_has_score_quantiles_per_iteration(training, training_rows):
    found = growth(training)

    assert (found.axis, found.end, found.bins) == ("iteration", 3, ((1, 1), (2, 2), (3, 3)))
    for at, ended in enumerate(iterations_of(of_type(training_rows, EpisodeRow)).values()):
        point = {name: values[at] for name, values in found.values.items()}
        spread = np.quantile([row.val_score for row in ended], [0, 0.25, 0.5, 0.75, 1])
        assert [point[name] for name in ("lowest", "25 %", "median", "75 %", "highest")] == pytest.approx(
            spread
        )
        lasted = [row for row in ended if row.ended_by == "horizon"]
        means = {"score": "val_score", "twin": "twin_val_score", "parameters": "params"}
        for name, column in means.items():
            assert point[name] == pytest.approx(np.mean([getattr(row, column) for row in lasted]))
        assert point["episodes"] == 5


def test_series_of_a_policy_training_with_450_iterations_are_averaged_in_bins_of_3_iterations(tmp_path):
    rows = made_run.training_rows(iterations=450, envs=1, horizon=1, slots=1)
    run = opened(tmp_path, rows)

    found = growth(run)
    assert len(found.bins) == 150 <= MOST_POINTS
    assert (found.bins[0], str(found.bins[0]), found.bins[-1].last) == ((1, 3), "1–3", 450)
    scores = [row.val_score for row in of_type(rows, EpisodeRow)[:3]]
    assert (found["lowest"][0], found["median"][0]) == (min(scores), sorted(scores)[1])
    assert found["score"][0] == pytest.approx(np.mean(scores))
    each = growth(run, joined=False)
    assert (each.bins[-1], each.last("score")) == ((450, 450), of_type(rows, EpisodeRow)[-1].val_score)
    updates = of_type(rows, UpdateRow)[:3]
    assert health(run).series["approx_kl"][0] == max(row.approx_kl for row in updates)
    returns = [row.total_reward for row in of_type(rows, EpisodeRow)[:3]]
    assert improvement(run)["25 %"][0] == pytest.approx(np.quantile(returns, 0.25))


# --- policy -----------------------------------------------------------------------------------------


def test_return_series_of_a_policy_training_has_quartiles_of_the_episode_returns(training, training_rows):
    found = improvement(training)
    updates = of_type(training_rows, UpdateRow)

    for at, ended in enumerate(iterations_of(of_type(training_rows, EpisodeRow)).values()):
        quartiles = np.quantile([row.total_reward for row in ended], [0.25, 0.5, 0.75])
        assert [found[name][at] for name in ("25 %", "median", "75 %")] == pytest.approx(quartiles)
    assert found["score"] == tuple(row.val_score for row in updates)
    assert found["evaluation score"] == tuple(row.evaluation_score for row in updates)


def test_policy_statistics_are_none_for_a_run_without_policy_training(tmp_path):
    run = opened(tmp_path, made_run.run_rows(horizon=3))

    assert [question(run) for question in (improvement, health, heads, reward, honesty)] == [None] * 5


def test_policy_metrics_have_the_limits_of_their_normal_range(training, training_rows):
    found = health(training)
    bands = {metric.name: (metric.low, metric.high) for metric in found.metrics}

    assert {"approx_kl", "clip_fraction", "value_nrmse", "ratio_min", "entropy"} <= set(bands)
    assert (bands["approx_kl"], bands["entropy"]) == ((None, 0.06), (None, None))
    clipped = [row.clip_fraction for row in of_type(training_rows, UpdateRow)]
    assert list(found.series["clip_fraction"]) == clipped


@pytest.mark.parametrize(
    ("value", "limit"), [(0.05, "< 0.1"), (0.1, ""), (0.3, ""), (0.31, "> 0.3"), (None, "")]
)
def test_metric_equal_to_a_limit_of_its_normal_range_is_within_the_range(value, limit):
    assert beyond(value, 0.1, 0.3) == limit


def test_entropy_of_an_action_head_with_one_legal_value_is_unknown_and_not_zero(training, training_rows):
    found = heads(training)
    updates = of_type(training_rows, UpdateRow)

    # In the third iteration the action head ``style`` never had more than one legal value.
    assert found["style"][2] is None
    entropies = [list(row) for row in zip(*found.values.values(), strict=True)]
    assert entropies == [row.head_entropy for row in updates]


def test_shares_of_ops_are_computed_over_all_decisions_of_an_iteration(training, training_rows):
    found = choices(training)
    for number in range(3):
        point = {name: values[number] for name, values in found.values.items()}
        rows = [row for row in of_type(training_rows, DecisionRow) if row.episode == number]
        assert point["decisions"] == len(rows) == 60
        for index, op in enumerate(OP_NAMES):
            chosen = [row for row in rows if row.action[0] == index]
            assert point[op] == pytest.approx(len(chosen) / 60)
            assert point[f"{op} forced"] == pytest.approx(sum(row.forced for row in chosen) / 60)
        assert point["forced"] == pytest.approx(sum(row.forced for row in rows) / 60)
        assert point["failed"] == pytest.approx(sum(not row.succeeded for row in rows) / 60)


def test_chart_of_ops_shows_a_decision_of_a_run_at_the_epoch_that_follows_the_decision(tmp_path):
    rows = made_run.run_rows(horizon=4)
    found = choices(opened(tmp_path, rows))

    chosen = [OP_NAMES[row.action[0]] for row in of_type(rows, DecisionRow)]
    assert [place.first for place in found.bins] == [1, 2, 3, 4]
    assert [found[op][at] for at, op in enumerate(chosen)] == [1.0] * 4


def test_without_decision_rows_shares_of_ops_are_known_but_shares_of_forced_decisions_are_unknown(tmp_path):
    rows = made_run.training_rows(iterations=2, envs=3, horizon=4)
    counts = of_type(rows, EpisodeRow)[:3]
    found = choices(opened(tmp_path, [row for row in rows if not isinstance(row, DecisionRow)]))

    chosen = [sum(row.op_counts[op] for row in counts) for op in range(6)]
    assert [found[op][0] * found["decisions"][0] for op in OP_NAMES] == pytest.approx(chosen)
    assert found.last("forced") is found.last("failed") is found.last("WAIT forced") is None


# --- other questions --------------------------------------------------------------------------------


def test_phase_times_come_from_update_rows_in_a_policy_training_and_from_epoch_rows_in_other_runs(
    training, training_rows, tmp_path
):
    rows = made_run.run_rows(horizon=4)
    for run, recorded in (
        (training, of_type(training_rows, UpdateRow)),
        (opened(tmp_path, rows), of_type(rows, EpochRow)),
    ):
        found = times(run)
        by_place = [
            dict(zip(found.values, values, strict=True))
            for values in zip(*found.values.values(), strict=True)
        ]
        assert by_place == [row.phase_ms for row in recorded]
    assert list(times(training).values) == ["rollout", "update", "evaluation"]


def configurations(scores: dict[tuple[bool, ...], float], epoch: int = 5) -> list[Row]:
    return [
        CounterfactualRow(env=0, episode=0, epoch=epoch, on=list(on), score=score, loss=1.0)
        for on, score in scores.items()
    ]


def test_slot_interactions_are_computed_from_the_last_epoch_with_counterfactual_scores(tmp_path):
    earlier = configurations({(False, True, False): 1.0, (True, True, False): 2.0}, epoch=4)
    # In the last epoch the second seed is on in every configuration, so its interactions are unknown.
    last = configurations(
        {
            (False, True, False): 10.0,
            (True, True, False): 30.0,
            (False, True, True): 20.0,
            (True, True, True): 60.0,
        }
    )
    rows = [made_run.run_row(horizon=5), *made_run.Episode(0, 0, 3, 5, random.Random(0), full=False).live()]
    found = interactions(opened(tmp_path, [*rows, *earlier, *last]))

    assert (found.epoch, found.slots, found.score) == (5, ("r0c0", "r0c2"), 60.0)
    # Score effects: 60 − 20 = 40 for the first slot, 60 − 30 = 30 for the third slot, and 60 − 20 − 30 + 10 =
    # 20 for the interaction of the two slots.
    assert found.matrix == ((40.0, 20.0), (20.0, 30.0))


def test_interaction_of_two_slots_is_unknown_if_their_joint_configuration_was_not_scored(tmp_path):
    last = configurations({(True, False, True): 1.0, (False, True, True): 2.0, (True, True, True): 5.0})
    rows = [made_run.run_row(horizon=5), *made_run.Episode(0, 0, 3, 5, random.Random(0), full=False).live()]
    found = interactions(opened(tmp_path, [*rows, *last]))

    assert found.matrix == ((3.0, None), (None, 4.0))


def test_result_of_a_policy_training_averages_scores_parameters_and_flops_over_its_last_iteration(
    training, training_rows, tmp_path
):
    single = opened(tmp_path, made_run.run_rows(horizon=3))
    arms = verdict({"policy": training, "single": single})
    trained, last = arms["policy"], [row for row in of_type(training_rows, EpisodeRow) if row.episode == 2]

    assert (len(trained.rows), len(arms["single"].rows)) == (5, 1)
    tested = trained.estimate("test_score")
    assert tested.mean == pytest.approx(np.mean([row.test_score for row in last]))
    assert (tested.margin or 0) > 0
    assert arms["single"].estimate("test_score").margin is None
    assert trained.mean("params") == np.mean([row.params for row in last])
    assert trained.flops == np.mean([3_000_000 * row.params for row in last])


def test_comparison_of_runs_omits_a_run_without_a_finished_episode(tmp_path):
    assert verdict({"empty": opened(tmp_path, [made_run.run_row()])}) == {}


def test_configuration_differences_of_two_runs_contain_only_keys_with_different_values(tmp_path):
    first, second = made_run.run_row(), made_run.run_row()
    config = {"episodes": 1, "nested": {"rate": 0.25, "new": True}}
    change(second, config=config, versions={"python": "3.12"})
    found = differences({"a": opened(tmp_path / "a", [first]), "b": opened(tmp_path / "b", [second])})

    assert found == {
        "config.nested.rate": (0.5, 0.25),
        "config.nested.new": ("–", True),
        "versions.python": ("3.11", "3.12"),
    }
