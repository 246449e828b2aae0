"""The screen is compared with what was looked at on a real terminal; render is pure, so it is equality."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.karn.following import Following
from esper.karn.palette import LOOKS
from esper.karn.screen import render
from esper.leyline.events import EpochRow, SeedRow
from esper.leyline.stages import Stage
from tests.karn import fake_run


def state_after(epoch: int, *, episode: int = 0, max_epochs: int = fake_run.EPOCHS) -> Following:
    """A life followed until the given epoch ended; every epoch takes 90 seconds."""
    state = Following(max_epochs)
    state.take(fake_run.run_row(), 0.0)
    lives = chain.from_iterable(fake_run.life(number) for number in range(episode + 1))
    for row in lives:
        state.take(row, 1000.0 * row.episode + 90.0 * row.epoch)
        if isinstance(row, EpochRow) and (row.episode, row.epoch) == (episode, epoch):
            break
    return state


def screen(state: Following, width: int, height: int) -> str:
    return "\n".join(line.rstrip() for line in render(state, width, height).plain.split("\n"))


AT_80_BY_24 = """\
 esper  digits_impaired · heuristic  epoch 6/8  ━━━━━━───  0:09:00  left 0:03:00

 score       58.0  ▂▂▃▃▄▄▆▆▆▆██      best 58.0
 twin        21.0  ▁▁▂▂▂▂▂▂▂▂▃▃      +37.0 over the twin
 loss       0.417  training, 0.393 validation
 params       398  ×1.59 the host's 250
 ops    0 refused  WAIT 3  GERMINATE 2  FOSSILIZE 1

                                    seed          alpha contribution  params
 r0c0   fossilized ░░▒▒▒▒▓▓▓▓◆◆     conv_light     1.00  +21.9 ± 0.8     148
 r0c1   embargoed  ··░░░░▒▒✂✂--     –                 –            –       –
 r0c2   dormant    ············     –                 –            –       –

 0  ∘ r0c0 conv_light germinated
 1  ∘ r0c1 conv_heavy germinated: plateau
 5  ✂ r0c1 conv_heavy pruned by the governor: non-finite loss
 5  ◆ r0c0 conv_light fossilized"""

AT_200_BY_60 = """\
 esper  digits_impaired · heuristic  epoch 8/8  BAR  0:12:00  left 0:00:00

 score       62.0  ▂▂▂▂▃▃▃▃▄▄▄▄▅▅▅▅▆▆▆▆▇▇▇▇████████  best 64.1
 twin        22.0  ▁▁▁▁▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▃▃▃▃▃▃▃▃  +40.0 over the twin
 loss       0.312  training, 0.306 validation
 params       438  ×1.75 the host's 250
 ops    1 refused  WAIT 3  GERMINATE 3  FOSSILIZE 2

                                                    seed          alpha contribution  params
 r0c0   fossilized ░░░░▒▒▒▒▒▒▒▒▓▓▓▓▓▓▓▓◆◆◆◆◆◆◆◆◆◆◆◆ conv_light     1.00  +21.9 ± 0.8     148
 r0c1   dormant    ····░░░░░░░░▒▒▒▒✂✂✂✂----~~~~···· –                 –            –       –
 r0c2   training   ························░░░░░░░░ norm           0.00            –      40

 0  ∘ r0c0 conv_light germinated
 1  ∘ r0c1 conv_heavy germinated: plateau
 5  ✂ r0c1 conv_heavy pruned by the governor: non-finite loss
 5  ◆ r0c0 conv_light fossilized
 6  ∘ r0c2 norm germinated"""

UNTRAINED = """\
 esper  digits_impaired · heuristic  epoch 0/8  ───────────────  0:00:00  left –

 score       10.0                    best 10.0
 twin        10.0                    +0.0 over the twin
 loss           –  training, 2.750 validation
 params       250  ×1.00 the host's 250
 ops    0 refused

                                    seed          alpha contribution  params
 r0c0   dormant                     –                 –            –       –
 r0c1   dormant                     –                 –            –       –
 r0c2   dormant                     –                 –            –       –"""


def test_a_life_under_way_at_80_by_24():
    assert screen(state_after(6), 80, 24) == AT_80_BY_24


def test_a_finished_life_at_200_by_60():
    assert screen(state_after(8), 200, 60) == AT_200_BY_60.replace("BAR", "━" * 40)


def test_an_untrained_host_shows_what_is_unknown():
    assert screen(state_after(0), 80, 24) == UNTRAINED


def test_before_the_first_life_there_is_a_header_alone():
    state = Following(8)
    assert screen(state, 80, 24) == " esper"
    state.take(fake_run.run_row(), 0.0)
    assert screen(state, 80, 24) == " esper  digits_impaired · heuristic"


def test_a_later_life_starts_afresh_and_is_numbered():
    first, later = screen(state_after(6), 80, 24), screen(state_after(6, episode=1), 80, 24)

    assert later.split("\n")[0] == (
        " esper  digits_impaired · heuristic · life 1  epoch 6/8  0:09:00  left 0:03:00"
    )
    assert later.split("\n")[1:] == first.split("\n")[1:]


def test_twenty_epochs_fit_one_column_each_at_80():
    lane = screen(state_after(6, max_epochs=20), 80, 24).split("\n")[9]

    assert lane == " r0c0   fossilized ░▒▒▓▓◆               conv_light     1.00  +21.9 ± 0.8     148"
    assert len(lane) == 80


def test_more_epochs_than_columns_share_a_column_and_a_prune_stays_visible():
    # 40 epochs in 20 columns: epochs 1-2, 3-4, 5-6 share one; the prune at 5 is followed by embargo at 6.
    lines = screen(state_after(6, max_epochs=40), 80, 24).split("\n")

    assert lines[10].startswith(" r0c1   embargoed  ░▒✂ ")


def test_an_empty_slot_forgets_the_seed_it_had():
    state = state_after(5)

    assert state.life is not None
    slot = state.life.slots[1]
    assert slot.stage is Stage.EMBARGOED
    assert (slot.blueprint, slot.alpha, slot.contribution, slot.params) == (None, None, None, None)


def test_a_lane_is_right_whichever_row_of_an_epoch_comes_first():
    rows = list(fake_run.life())
    epochs = range(1, fake_run.EPOCHS + 1)
    seeds_last = [row for row in rows if row.epoch == 0]
    for epoch in epochs:
        seeds_last += sorted(
            (row for row in rows if row.epoch == epoch), key=lambda row: isinstance(row, SeedRow)
        )
    state = Following(fake_run.EPOCHS)
    for row in seeds_last:
        state.take(row, 0.0)

    assert state.life is not None
    for seed in (0, 2):
        lane = state.life.slots[seed].lane
        expected = fake_run.STAGES_OF_SEED[seed]
        assert {epoch: lane[epoch] for epoch in expected} == expected


def test_other_environments_are_passed_over():
    state = state_after(6)
    before = screen(state, 80, 24)

    assert not state.take(fake_run.epoch_row(8, env=1), 540.0)
    assert screen(state, 80, 24) == before


def test_colour_is_the_colour_of_the_stage():
    text = render(state_after(6), 80, 24)
    at = text.plain.index("◆")

    assert LOOKS[Stage.FOSSILIZED].colour in {
        str(span.style) for span in text.spans if span.start <= at < span.end
    }


def test_slots_that_do_not_fit_are_counted():
    state = Following(8)
    run = fake_run.run_row()
    run.slots = [f"r0c{column}" for column in range(40)]
    state.take(run, 0.0)
    state.take(fake_run.epoch_row(0), 0.0)

    lines = screen(state, 80, 24).split("\n")
    assert lines[-1] == " and 30 more slots"
    assert len(lines) <= 24


@given(
    width=st.integers(1, 250), height=st.integers(1, 80), epoch=st.integers(0, 8), total=st.integers(1, 300)
)
def test_no_size_of_terminal_is_exceeded(width, height, epoch, total):
    lines = render(state_after(epoch, max_epochs=total), width, height).plain.split("\n")

    assert len(lines) <= height
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("max_epochs", [8, 20])
def test_without_a_run_row_names_are_made_up(max_epochs):
    state = Following(max_epochs)
    for row in fake_run.life():
        state.take(row, 0.0)

    assert " slot0  fossilized" in screen(state, 80, 24)
    assert "slot1 conv_heavy pruned by the governor" in screen(state, 80, 24)
