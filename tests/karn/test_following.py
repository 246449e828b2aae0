import pytest

from esper.karn.following import Following
from esper.leyline.events import SeedRow
from esper.leyline.stages import Stage
from tests.karn import fake_run, fake_training
from tests.karn.screens import run_after, state_of


def test_rows_before_the_run_are_not_followed():
    state = Following()

    assert not state.take(fake_run.epoch_row(1), 0.0)
    assert state.episode is None


def test_the_best_episode_of_an_iteration_is_the_one_with_the_highest_score():
    # Scores rise with the environment: 41, 42, 43 and 44 in iteration 42.
    state = state_of(fake_training.course(42))

    assert state.episode is not None
    assert (state.episode.env, state.episode.episode) == (3, 41)
    assert [episode.env for episode in state.episodes] == [0, 1, 2, 3]


def test_an_episode_that_broke_down_is_shown_only_if_its_environment_was_chosen():
    state = state_of(fake_training.troubled_course(42), env=1)

    assert [(episode.env, episode.episode) for episode in state.episodes][:3] == [
        (0, 41),
        (1, 41),
        (1, 1_000_041),
    ]
    assert state.episode is not None
    assert (state.episode.env, state.episode.episode, state.episode.result) == (1, 1_000_041, None)


def test_an_iteration_knows_quartiles_twins_and_failures_of_its_episodes():
    # Iteration 10: returns 0.05, 0.15, 0.25, 0.35; twins 15 to 18; 1 of 8 decisions of each episode refused.
    state = state_of(fake_training.course(10))
    last = state.iterations[-1]

    assert last.returns == pytest.approx((0.125, 0.275))
    assert (last.twin_score, last.refused_share) == (16.5, 0.125)


def test_a_single_episode_has_no_quartiles():
    run = fake_training.run_row(envs=1)
    state = state_of([run, fake_training.episode_row(1, 0), fake_training.update_row(1)])

    assert state.iterations[-1].returns == (None, None)


def test_iterations_that_a_resumed_training_repeats_replace_the_old_ones():
    state = state_of(fake_training.course(5))
    for number in (3, 4):
        for row in fake_training.iteration_rows(number):
            state.take(row, 0.0)

    assert [past.row.iteration for past in state.iterations] == [1, 2, 3, 4]
    assert len(state.episodes) == fake_training.ENVS


def test_the_clock_of_a_training_is_that_of_its_iterations():
    # 42 iterations of 12.5 s are 525 s; 58 more take 725 s. Seven seconds of the next one have passed.
    state = state_of(fake_training.course(42))
    state.now = 7.0

    assert state.elapsed == pytest.approx(532.0)
    assert state.left == pytest.approx(718.0)
    assert state.steps_per_second == pytest.approx(4 * 8 / 12.5)


def test_the_clock_of_a_run_is_that_of_its_epochs():
    # Epochs 0 to 6 of 15 ms each; two more at the pace of the six that were trained.
    state = state_of(run_after(6))

    assert state.elapsed == pytest.approx(0.105)
    assert state.left == pytest.approx(2 * 0.105 / 6)


def test_nothing_is_known_of_the_time_before_anything_is_finished():
    for run in (fake_run.run_row(), fake_training.run_row()):
        state = state_of([run])

        assert (state.left, state.steps_per_second) == (None, None)


def test_an_alert_is_open_until_it_is_cleared():
    state = state_of([fake_training.run_row(), fake_training.alert_row("kl", 1)])
    (alert,) = state.alerts.values()

    assert state.is_open(alert)
    state.take(fake_training.alert_row("kl", 2, "cleared"), 0.0)
    assert not state.is_open(alert)
    state.take(fake_training.alert_row("kl", 3), 0.0)
    (again,) = state.alerts.values()
    assert state.is_open(again)
    assert again.times == 2


def test_an_alert_about_an_episode_ends_with_the_iteration_of_the_episode():
    state = state_of(fake_training.troubled_course(42))
    alert = state.alerts["collapse", "environment 1"]

    assert state.is_open(alert)
    for row in fake_training.ends_of_iteration(43):
        state.take(row, 0.0)
    assert not state.is_open(alert)


def test_an_alert_about_the_episode_of_a_run_stays():
    state = state_of([*run_after(4), fake_run.alert_row()])
    state.take(fake_run.epoch_row(5), 0.0)

    assert all(map(state.is_open, state.alerts.values()))


def test_an_empty_slot_forgets_the_seed_it_had_but_for_its_name():
    state = state_of(run_after(5))

    assert state.episode is not None
    slot = state.episode.slots[1]
    assert slot.stage is Stage.EMBARGOED
    assert (slot.blueprint, slot.alpha, slot.contribution, slot.params) == (None, None, None, None)
    assert slot.last_blueprint == fake_run.SEED_BLUEPRINTS[1]


def test_a_lane_is_right_whichever_row_of_an_epoch_comes_first():
    rows = list(fake_run.episode())
    seeds_last = [row for row in rows if row.epoch == 0]
    for epoch in range(1, fake_run.EPOCHS + 1):
        seeds_last += sorted(
            (row for row in rows if row.epoch == epoch), key=lambda row: isinstance(row, SeedRow)
        )
    lanes = []
    for ordered in (rows, seeds_last):
        state = state_of([fake_run.run_row(), *ordered])
        assert state.episode is not None
        lanes.append([slot.lane for slot in state.episode.slots])

    expected = fake_run.STAGES_OF_SEED[0]
    assert {epoch: lanes[1][0][epoch] for epoch in expected} == expected
    assert lanes[1][0] == lanes[0][0]


def test_a_seed_that_the_commit_removes_ends_its_lane():
    state = state_of([fake_run.run_row(), *fake_run.episode()])

    assert state.episode is not None
    assert state.episode.slots[2].lane[8] is Stage.PRUNED


def test_other_environments_of_a_run_are_passed_over():
    state = state_of(run_after(6))

    assert not state.take(fake_run.epoch_row(8, env=1), 0.0)
    assert state.episode is not None
    assert state.episode.epoch == 6
