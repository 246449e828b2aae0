"""Screens are compared with files that were looked at; render is pure, so it is equality."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from esper.karn.following import Following
from esper.karn.palette import LOOKS, SEVERITIES
from esper.karn.screen import render
from esper.leyline.events import SeedRow
from esper.leyline.stages import Stage
from tests.karn import fake_run, fake_training
from tests.karn.screens import CASES, drawn, path_of, run_after, state_of, text_of


@pytest.mark.parametrize("case", CASES)
def test_a_screen_is_the_one_that_was_looked_at(case):
    assert text_of(case) == path_of(case).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "case",
    [
        "run-finished-with-alert",
        "training-before-its-first-iteration",
        "training-in-trouble-large",
        "training-in-trouble-eight-slots",
    ],
)
def test_no_line_is_wider_than_a_terminal_of_40_to_200_columns(case):
    rows, (_, height) = CASES[case]
    state = state_of(rows())
    for width in range(40, 201):
        lines = render(state, width, height).plain.split("\n")

        assert max(map(cell_len, lines)) <= width
        assert len(lines) <= height


@settings(max_examples=60, deadline=None)
@given(case=st.sampled_from(sorted(CASES)), width=st.integers(1, 250), height=st.integers(1, 80))
def test_no_size_of_terminal_is_exceeded(case, width, height):
    lines = render(state_of(CASES[case][0]()), width, height).plain.split("\n")

    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("training-in-trouble")])
def test_a_higher_screen_says_everything_that_a_lower_one_says(case):
    state = state_of(CASES[case][0]())
    labels = [{line[1:9].strip() for line in drawn(state, 80, height).split("\n")} for height in (18, 24, 60)]

    assert labels[0] <= labels[1] <= labels[2]
    assert "episodes" in labels[2] - labels[1]


def styles_at(text: Text, found: str) -> str:
    """The styles of the first character of ``found``."""
    at = text.plain.index(found)
    return " ".join(str(span.style) for span in text.spans if span.start <= at < span.end)


def test_colour_is_the_colour_of_the_stage():
    text = render(state_of(run_after(6)), 80, 23)

    assert LOOKS[Stage.FOSSILIZED].colour in styles_at(text, "◆")
    assert LOOKS[Stage.TRAINING].colour in styles_at(text, "░")


def test_colour_is_the_colour_of_the_severity_while_an_alert_is_open():
    text = render(state_of(fake_training.troubled_course(42)), 200, 60)

    assert SEVERITIES["error"].colour in styles_at(text, "non-finite-update")
    assert SEVERITIES["warning"].colour in styles_at(text, "kl  policy")
    assert styles_at(text, "value-error") == "dim"


@pytest.mark.parametrize("width", [80, 200])
def test_a_number_is_dim_inside_its_band_and_bright_with_its_limit_outside(width):
    healthy, ill = fake_training.update_row(1), fake_training.troubled(fake_training.update_row(1))
    inside, outside = (render(state_of([fake_training.run_row(), row]), width, 60) for row in (healthy, ill))

    assert styles_at(inside, "0.005") == "dim"
    assert ">0.06" not in inside.plain
    assert styles_at(outside, "0.081") == "bold"
    assert outside.plain.index(">0.06") == outside.plain.index("0.081") + len("0.081 ")


def test_what_has_no_band_is_neither_dim_nor_bright():
    text = render(state_of([fake_training.run_row(), fake_training.update_row(1)]), 80, 60)

    assert styles_at(text, "lead +0.03") == ""


def test_before_the_run_there_is_a_header_alone():
    assert drawn(Following(), 80, 24) == " esper  waiting for the run to begin"


def test_a_later_episode_starts_afresh_and_is_numbered():
    first = drawn(state_of(run_after(6)), 80, 24).split("\n")
    later = drawn(state_of(run_after(6, episode=1)), 80, 24).split("\n")

    assert "  episode 1  epoch 6/8" in later[0]
    assert later[1:] == first[1:]


def lanes(horizon: int, width: int = 80) -> list[str]:
    """The lanes of a run that is six epochs old."""
    run, *rows = run_after(6)
    run.horizon = horizon
    return [line for line in drawn(state_of([run, *rows]), width, 24).split("\n") if line.startswith(" r0c")]


def test_twenty_epochs_fit_one_column_each_at_80():
    lane = lanes(20)[0]

    assert lane == " r0c0   fossilized ░▒▒▓▓◆               conv_light     1.00  +21.9 ± 0.8     148"
    assert len(lane) == 80


def test_more_epochs_than_columns_share_a_column_and_a_prune_stays_visible():
    # A lane of 40 epochs gets 33 of 80 columns: 19 stand before it, 28 are for seed and contribution.
    # The fifth column is epochs 5 and 6: the prune in 5 is followed by the embargo in 6.
    lane = lanes(40)[1]

    assert lane.startswith(" r0c1   embargoed  ·░░▒✂ ")


def test_scores_and_lanes_begin_in_the_same_column_and_take_as_many():
    lines = drawn(state_of(run_after(8)), 80, 24).split("\n")
    score, lane = (next(line for line in lines if line.startswith(start)) for start in (" score", " r0c0"))

    assert [set(line[19:35]) <= set("▁▂▃▄▅▆▇█░▒▓◆") for line in (score, lane)] == [True, True]
    assert score[35:37] == "  "


def test_slots_that_do_not_fit_are_counted():
    run = fake_run.run_row()
    run.slots = [f"r0c{column}" for column in range(40)]
    lines = drawn(state_of([run, fake_run.epoch_row(0)]), 80, 24).split("\n")
    shown = sum(line.startswith(" r0c") for line in lines)

    assert f" and {40 - shown} more slots" in lines
    assert shown >= 8


def test_a_policy_that_runs_says_what_it_expects_and_how_it_leans():
    state = state_of([fake_run.run_row(), fake_run.epoch_row(0), fake_run.policy_decision_row(0)])

    assert " policy  expects +0.30  wait 25 %  germ 62 %  alpha 0 %  prune 12 %  foss 0 %  adv 0 %"[
        :80
    ] in drawn(state, 100, 24)


def test_an_update_that_was_left_out_is_told():
    row = fake_training.update_row(1)
    row.skipped = "reward of environment 1 is not finite"
    for size in ((80, 24), (200, 60)):
        text = render(state_of([fake_training.run_row(), row]), *size)

        assert "policy  update left out: reward of environment 1 is not finite" in text.plain
        assert styles_at(text, "update left out") == "bold"


def test_the_chosen_environment_is_shown_instead_of_the_best():
    lines = drawn(state_of(fake_training.course(42), env=1), 80, 24)

    assert " slots   iteration 42: environment 1, return +0.79, score 42.0, twin 16.0" in lines


def test_the_same_alert_again_is_counted_and_not_repeated():
    rows = [fake_training.run_row(), *(fake_training.alert_row("kl", number) for number in (1, 2, 3))]
    alerts = [line for line in drawn(state_of(rows), 80, 24).split("\n") if "kl" in line]

    assert alerts == [" alerts  ▲ kl  policy  found 0.0812, limit 0.06  iteration 3, 3 times  Lower learni…"]


def test_contribution_is_known_from_a_move_where_no_seed_rows_are_written():
    move = fake_run.transition_row(5, 0, Stage.HOLDING, Stage.FOSSILIZED, "policy", "fossilized")
    move.contribution = 7.25
    rows = [*fake_training.without_seeds(run_after(5)), move]

    assert "conv_light        –         +7.2       –" in drawn(state_of(rows), 80, 24)


def test_the_error_of_a_contribution_outlasts_a_move_that_repeats_it():
    move = fake_run.transition_row(5, 0, Stage.HOLDING, Stage.FOSSILIZED, "policy", "fossilized")
    move.contribution = 21.94

    assert "+21.9 ± 0.8" in drawn(state_of([*run_after(5), move]), 80, 24)


def test_a_seed_whose_gradients_are_unhealthy_stands_out():
    rows = list(run_after(6))
    for row in rows:
        if isinstance(row, SeedRow):
            row.gradient_health = 0.4
    text = render(state_of(rows), 200, 60)

    assert styles_at(text, "0.40 <0.7") == "bold"


def test_a_head_that_is_dead_is_seen_on_a_crowded_screen():
    # Eight slots and three alerts leave one line for the entropies of healthy heads.
    lines = drawn(state_of(fake_training.troubled_course(42, slots=8)), 80, 23).split("\n")

    assert any("tempo 0.04 <0.1" in line for line in lines)
    assert sum(line.startswith(" r0c") for line in lines) == 8
