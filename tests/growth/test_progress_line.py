"""Line with the time left: its text, its interval, and when ``grow`` shows it."""

import io
from collections.abc import Iterator

import pytest
from torch.nn.functional import cross_entropy

import esper
from esper.growth.growth_events import ProgressLine
from esper.leyline.errors import GrowthWarning
from tests.growth.test_training_settings import loader, network


def clock(*times: float) -> Iterator[float]:
    return iter(times)


def test_time_left_is_extrapolated_from_the_first_update_also_in_a_resumed_training() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream, clock(10.0, 40.0).__next__)
    line.update(0.5, "epoch 6")
    line.update(0.6, "epoch 7")
    # A tenth of the training took 30 seconds, and four tenths are left.
    assert stream.getvalue() == "\repoch 6\repoch 7, 0:02:00 left"


def test_updates_within_a_tenth_of_a_second_are_not_shown() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream, clock(0.0, 0.05, 0.2).__next__)
    for number in range(3):
        line.update(0.0, f"step {number}")
    assert stream.getvalue() == "\rstep 0\rstep 2"


def test_shorter_text_and_clear_overwrite_the_whole_line() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream, clock(0.0, 1.0).__next__)
    line.update(0.0, "loss 0.123")
    line.update(0.0, "loss 1")
    line.clear()
    line.clear()
    assert stream.getvalue() == "\rloss 0.123\rloss 1    \r      \r"


def test_line_is_cut_to_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    stream = io.StringIO()
    ProgressLine(stream, clock(0.0).__next__).update(0.0, "a text of many columns")
    assert stream.getvalue() == "\ra text of"


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_line_that_cannot_be_written_is_reported_once_and_left_out() -> None:
    line = ProgressLine(Full(), clock(0.0, 1.0).__next__)
    with pytest.warns(GrowthWarning, match="cannot be shown: No space left on device; the training contin"):
        line.update(0.0, "step 1")
    line.update(0.5, "step 2")


def train(**settings: object) -> None:
    known = {"loss": cross_entropy, "epochs": 2, "controller": None, "show": lambda _: None}
    esper.grow(network(), loader(16), loader(50), **known, **settings)


def test_grow_shows_epoch_step_loss_and_ends_with_an_empty_line(capsys: pytest.CaptureFixture[str]) -> None:
    train(progress=True)
    shown = capsys.readouterr().err
    assert shown.startswith("\repoch 1, step 1 of 7, loss ")
    assert shown.split("\r")[-1] == ""
    assert not shown.split("\r")[-2].strip()


def test_grow_shows_no_line_if_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    train()
    assert capsys.readouterr().err == ""


def test_grow_shows_a_line_in_a_terminal_unless_it_is_switched_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    train(progress=False)
    assert capsys.readouterr().err == ""
    train()
    assert "epoch 1, step 1 of 7" in capsys.readouterr().err
