import io
from collections.abc import Iterable
from itertools import chain

import pytest
from rich.console import Console
from rich.text import Text

from esper.karn.live import LiveView
from esper.leyline.events import AlertRow, EpochRow, Row
from tests.karn import fake_run, fake_training

LOG = """\
run demo: task digits_impaired, controller heuristic, rng seed 0, host of 250 parameters, slots r0c0 r0c1 r0c2
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
episode 0 ended (horizon) after 0:00:12: validation 61.5, test 60.2, twin 22.0, params 398 ×1.59
"""


def shown(console: Console, rows: Iterable[Row] | None = None, env: int | None = None) -> None:
    with LiveView(console, env=env) as view:
        for row in rows or chain([fake_run.run_row()], fake_run.episode()):
            view.emit(row)


def logged(rows: Iterable[Row], env: int | None = None) -> list[str]:
    file = io.StringIO()
    shown(Console(file=file), rows, env)
    return file.getvalue().splitlines()


def test_without_a_terminal_there_is_one_line_per_epoch_and_per_change_that_matters():
    file = io.StringIO()
    shown(Console(file=file, width=40))

    assert file.getvalue() == LOG


def test_a_dumb_terminal_gets_plain_lines():
    file = io.StringIO()
    shown(Console(file=file, force_terminal=True, _environ={"TERM": "dumb"}))

    assert file.getvalue() == LOG


def test_later_episodes_say_which_one_they_are():
    lines = logged(chain([fake_run.run_row()], fake_run.episode(0), fake_run.episode(1)))

    assert lines[: len(LOG.splitlines())] == LOG.splitlines()
    assert (
        lines[21] == "episode 1  epoch 0/8  loss      –  score  10.0  twin  10.0  params 250 ×1.00  slots ..."
    )
    assert lines[22] == "episode 1  after epoch 0: r0c0 conv_light germinated"


def test_an_unknown_twin_is_a_dash():
    run, row = fake_run.run_row(), fake_run.epoch_row(1)
    run.horizon, row.twin_score = 20, None

    assert logged([run, row])[2:] == [
        "epoch  1/20  loss  2.500  score  14.0  twin     –  params 398 ×1.59  slots ..."
    ]


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

    with pytest.raises(KeyboardInterrupt), LiveView(console):
        raise KeyboardInterrupt
    assert file.getvalue().endswith("\x1b[?25h")


def test_one_environment_is_followed():
    lines = logged([fake_run.run_row(), fake_run.epoch_row(1), fake_run.epoch_row(2, env=1)], env=1)

    assert [line[:9] for line in lines[2:]] == ["epoch 2/8"]


def test_a_view_does_not_change_the_rows():
    rows = [fake_run.run_row(), *fake_run.episode()]
    shown(Console(file=io.StringIO()), rows)

    assert rows == [fake_run.run_row(), *fake_run.episode()]
    assert all(row.t == 0.0 for row in rows if isinstance(row, EpochRow))


def governor_alert(value: float | None, limit: float | None) -> AlertRow:
    row = fake_run.alert_row()
    row.severity, row.value, row.limit = "error", value, limit
    row.scope, row.hint, row.episode, row.epoch = "environment 0", "the governor rolled back", 1, 7
    return row


@pytest.mark.parametrize(
    ("value", "limit", "found"),
    [(2.314, 2.2561, "found 2.31, limit 2.26"), (None, None, "found –")],
)
def test_an_alert_of_a_run_is_one_line(value: float | None, limit: float | None, found: str) -> None:
    assert logged([fake_run.run_row(), governor_alert(value, limit)])[2:] == [
        f"error collapse raised in episode 1, epoch 7 (environment 0): {found}; the governor rolled back"
    ]


TRAINING_LOG = """\
iteration 1/100  left 0:20:37  return +0.02  score 22.0  twin 16.5  params 410  kl 0.005  ev +0.90  entropy 1.50\
  wait 50 % germ 25 % prune 12 % foss 12 %
iteration 2/100  left 0:20:25  return +0.04  score 22.5  twin 16.5  params 420  kl 0.006  ev +0.89  entropy 1.50\
  wait 50 % germ 25 % prune 12 % foss 12 %
warning kl raised in iteration 2 (policy): found 0.0812, limit 0.06; Lower learning_rate.
warning kl cleared in iteration 3 (policy): found 0.01, limit 0.06
"""


def test_a_training_logs_exactly_one_line_per_iteration_and_one_per_alert():
    rows = chain(
        [fake_training.run_row()],
        fake_training.iteration_rows(1),
        fake_training.iteration_rows(2),
        [fake_training.alert_row("kl", 2), fake_training.alert_row("kl", 3, "cleared", value=0.01)],
    )

    assert "\n".join(logged(rows)) + "\n" == TRAINING_LOG


def test_an_iteration_says_what_was_evaluated_and_what_was_left_out():
    row = fake_training.update_row(10)
    row.skipped = "reward of environment 1 at step 2 is nan"
    (line,) = logged([fake_training.run_row(), row])

    assert "  | argmax return +0.30, score 35.0  | update left out: reward of environment 1 at" in line


def test_what_is_unknown_of_an_iteration_is_never_a_number():
    row = fake_training.update_row(1)
    row.mean_return = row.val_score = row.params = row.explained_variance = row.entropy = None
    (line,) = logged([fake_training.run_row(), row])

    assert "return –  score –  twin –  params –" in line
    assert "ev –  entropy –" in line


def test_what_is_recalled_is_known_but_not_said():
    file = io.StringIO()
    with LiveView(Console(file=file), clock=lambda: 100.0) as view:
        view.recall(fake_training.course(3))
        for row in fake_training.iteration_rows(4):
            view.emit(row)

    (line,) = file.getvalue().splitlines()
    assert line.startswith("iteration 4/100  left 0:20:00  ")


def test_the_time_since_old_rows_counts_as_elapsed():
    # 3 iterations of 12.5 s, and the last one ended 30 s ago.
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system=None, width=80, height=24)
    with LiveView(console, clock=lambda: 1000.0) as view:
        view.recall(fake_training.course(3), age=30.0)

    assert "0:01:07  left 0:19:42" in file.getvalue()


def test_a_screen_is_drawn_anew_only_when_something_changed(monkeypatch: pytest.MonkeyPatch):
    draws: list[int] = []
    monkeypatch.setattr("esper.karn.live.render", lambda *_: draws.append(1) or Text("x"))
    now = [0.0]
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24)
    view = LiveView(console, clock=lambda: now[0])
    for seconds in (0.0, 0.25, 0.5, 1.0):
        now[0] = seconds
        view._draw()
    assert len(draws) == 2
    view.emit(fake_run.run_row())
    view._draw()
    assert len(draws) == 3
