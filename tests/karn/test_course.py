"""The view of a training, on a terminal of 80 columns and in a log."""

import io
from collections.abc import Iterator
from itertools import count

import pytest
from rich.console import Console

from esper.karn.course import CourseView
from esper.leyline.events import UpdateRow
from tests.nissa.test_writer import update_row


def console(terminal: bool) -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    return Console(file=file, force_terminal=terminal, width=80, height=24, color_system=None)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.TextIOWrapper)
    console.file.flush()
    raw = console.file.buffer
    assert isinstance(raw, io.BytesIO)
    return raw.getvalue().decode()


def rounds(number: int) -> Iterator[UpdateRow]:
    for index in range(1, number + 1):
        row = update_row(index)
        row.mean_return, row.val_score, row.anomalies = 0.1 * index, 20.0 + index, []
        row.op_shares = [0.6, 0.15, 0.1, 0.02, 0.13, 0.0]
        yield row


def ticking(seconds: float) -> Iterator[float]:
    return (seconds * number for number in count())


@pytest.fixture
def last() -> UpdateRow:
    *_, row = rounds(20)
    row.evaluation_return, row.evaluation_score = 2.5, 77.6
    row.anomalies = ["ratio_explosion", "tempo_collapsed"]
    return row


def test_a_log_gets_one_line_per_round_with_the_time_left() -> None:
    out, clock = console(terminal=False), ticking(30)
    with CourseView(out, 20, clock=lambda: next(clock)) as view:
        for row in rounds(3):
            view.emit(row)
    lines = text_of(out).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["round 1/20", "round 2/20", "round 3/20"]
    assert "left 0:08:30" in lines[-1], "three rounds in 90 s, 17 to go"
    assert "return +0.30  score 23.0" in lines[-1]


def test_a_line_says_what_was_evaluated_and_what_was_wrong(last: UpdateRow) -> None:
    out = console(terminal=False)
    last.skipped = "reward of environment 1 at step 2 is nan"
    CourseView(out, 50).emit(last)
    line = text_of(out)
    assert "| evaluation: return +2.50, score 77.6" in line
    assert "| ratio_explosion, tempo_collapsed" in line
    assert "| update left out: reward of environment 1 at step 2 is nan" in line


def test_the_screen_fits_80_columns_and_24_lines(last: UpdateRow) -> None:
    view = CourseView(console(terminal=True), 50)
    for row in (*rounds(19), last):
        view.emit(row)
    lines = view.render().plain.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 23
    assert lines[0].startswith("round 20/50  ██████████░░░░░░░░░░░░░░")
    assert "evaluation     77.6  in round 20; best 77.6 in round 20" in lines
    assert "anomaly     ratio_explosion, tempo_collapsed in round 20" in lines


def test_what_is_unknown_is_never_a_number(last: UpdateRow) -> None:
    last.mean_return = last.val_score = last.params = last.explained_variance = last.entropy = None
    last.head_entropy, last.evaluation_score = [], None
    out = console(terminal=False)
    view = CourseView(out, 50)
    view.emit(last)
    assert "return –  score –  params –  ev –" in text_of(out)
    assert "nan" not in view.render().plain.lower()


def test_a_terminal_is_redrawn_and_a_log_is_not(last: UpdateRow) -> None:
    terminal = console(terminal=True)
    with CourseView(terminal, 50) as view:
        view.emit(last)
    log = console(terminal=False)
    with CourseView(log, 50) as view:
        view.emit(last)
    assert "best 77.6 in round 20" in text_of(terminal)
    assert "\x1b" in text_of(terminal)
    assert "\x1b" not in text_of(log)
