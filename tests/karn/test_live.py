import io
from itertools import chain

import pytest
from rich.console import Console

from esper.karn.following import Following
from esper.karn.lines import plain_lines
from esper.karn.live import LiveView
from esper.leyline.events import AlertRow, EpochRow
from tests.karn import fake_run

LOG = """\
run demo: task digits_impaired, decider heuristic, rng seed 0, host of 250 parameters, slots r0c0 r0c1 r0c2
stages: . dormant, G germinated, T training, B blending, H holding, F fossilized, E embargoed, R resetting
epoch 0/8  loss      –  score  10.0  twin  10.0  params 250 ×1.00  slots ...
after epoch 0: r0c0 conv_light germinated
epoch 1/8  loss  2.500  score  14.0  twin  12.0  params 398 ×1.59  slots T..
after epoch 1: r0c1 conv_heavy germinated: plateau
after epoch 2: r0c0 conv_light blending: incubation is over
epoch 2/8  loss  1.250  score  22.5  twin  14.0  params 1,598 ×6.39  slots BT.
epoch 3/8  loss  0.833  score  30.0  twin  16.5  params 1,598 ×6.39  slots BT.
after epoch 4: r0c0 conv_light holding: full alpha reached
after epoch 4: r0c1 conv_heavy blending: incubation is over
epoch 4/8  loss  0.625  score  41.0  twin  18.0  params 1,598 ×6.39  slots HB.
after epoch 5: r0c1 conv_heavy pruned by the governor: non-finite loss
epoch 5/8  loss  0.500  score  47.5  twin  19.5  params 398 ×1.59  slots HE.
after epoch 5: r0c0 conv_light fossilized
epoch 6/8  loss  0.417  score  58.0  twin  21.0  params 398 ×1.59  slots FE.
after epoch 6: r0c2 norm germinated
epoch 7/8  loss  0.357  score  64.1  twin  22.0  params 438 ×1.75  slots FRT
epoch 8/8  loss  0.312  score  62.0  twin  22.0  params 438 ×1.75  slots F.T
after epoch 8: r0c2 norm pruned: horizon
life 0 ended (horizon) after 0:00:12: validation 61.5, test 60.2, twin 22.0, params 398 ×1.59
"""


def shown(console: Console, *, lives: int = 1) -> None:
    rows = chain([fake_run.run_row()], *(fake_run.life(number) for number in range(lives)))
    with LiveView(console, max_epochs=fake_run.EPOCHS) as view:
        for row in rows:
            view.emit(row)


def test_without_a_terminal_there_is_one_line_per_epoch_and_per_change_that_matters():
    file = io.StringIO()
    shown(Console(file=file, width=40))

    assert file.getvalue() == LOG


def test_a_dumb_terminal_gets_plain_lines():
    file = io.StringIO()
    shown(Console(file=file, force_terminal=True, _environ={"TERM": "dumb"}))

    assert file.getvalue() == LOG


def test_later_lives_say_which_one_they_are():
    file = io.StringIO()
    shown(Console(file=file), lives=2)
    lines = file.getvalue().splitlines()

    assert lines[: len(LOG.splitlines())] == LOG.splitlines()
    assert lines[21] == "life 1  epoch 0/8  loss      –  score  10.0  twin  10.0  params 250 ×1.00  slots ..."
    assert lines[22] == "life 1  after epoch 0: r0c0 conv_light germinated"


def test_an_unknown_twin_is_a_dash():
    file = io.StringIO()
    row = fake_run.epoch_row(1)
    row.twin_score = None
    with LiveView(Console(file=file), max_epochs=20) as view:
        view.emit(row)

    assert file.getvalue() == "epoch  1/20  loss  2.500  score  14.0  twin     –  params 398 ×1.59  slots \n"


def test_a_file_that_knows_only_ascii_still_gets_its_lines():
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    shown(Console(file=file, force_terminal=True))

    assert b"params 398 ?1.59  slots T..\n" in raw.getvalue()


def test_on_a_terminal_the_last_screen_shows_the_last_state_and_the_cursor_comes_back():
    file = io.StringIO()
    shown(Console(file=file, force_terminal=True, color_system=None, width=80, height=24))

    last = file.getvalue().rsplit("esper", 1)[1]
    assert "epoch 8/8" in last
    assert "✂ r0c2 norm pruned: horizon" in last
    assert last.endswith("\x1b[?25h")


def test_an_error_in_the_run_passes_through_and_the_cursor_comes_back():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, height=24)

    with pytest.raises(KeyboardInterrupt), LiveView(console, max_epochs=8):
        raise KeyboardInterrupt
    assert file.getvalue().endswith("\x1b[?25h")


def test_one_environment_is_followed():
    file = io.StringIO()
    with LiveView(Console(file=file), max_epochs=8, env=1) as view:
        view.emit(fake_run.epoch_row(1))
        view.emit(fake_run.epoch_row(2, env=1))

    assert file.getvalue().count("\n") == 1
    assert file.getvalue().startswith("epoch 2/8")


def test_a_view_does_not_change_the_rows():
    rows = [fake_run.run_row(), *fake_run.life()]
    with LiveView(Console(file=io.StringIO()), max_epochs=8) as view:
        for row in rows:
            view.emit(row)

    assert rows == [fake_run.run_row(), *fake_run.life()]
    assert all(row.t == 0.0 for row in rows if isinstance(row, EpochRow))


@pytest.mark.parametrize(
    ("value", "limit", "reason"),
    [
        (2.314, 2.2561, "collapse (a loss of 2.31, at most 2.26 is healthy)"),
        (None, None, "collapse (a loss that is not finite)"),
    ],
)
def test_an_intervention_of_the_governor_is_a_line(
    value: float | None, limit: float | None, reason: str
) -> None:
    row = AlertRow(
        env=0, episode=1, epoch=7, rule="collapse", value=value, limit=limit, answer="rolled back to epoch 6"
    )
    assert plain_lines(row, Following(max_epochs=8)) == [
        f"life 1  after epoch 7: the governor rolled back to epoch 6 because of {reason}"
    ]
