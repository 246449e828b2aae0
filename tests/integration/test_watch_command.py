"""``esper watch`` as a user meets it: beside a living writer, after its death, and long after."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from esper.karn.run import open_run
from esper.leyline.events import Row
from esper.nissa.writer import RunWriter
from esper.scripts import cli
from esper.scripts.watch_command import WatchConfig, watch
from tests.integration.training import Refused
from tests.karn import fake_training

ROOT = Path(__file__).parents[2]
WATCH = "from esper.scripts.cli import main; main()"


class Process:
    """A child process that is talked to line by line, and ended with the test."""

    def __init__(self, *words: str) -> None:
        paths = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
        environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"}
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.child = subprocess.Popen([sys.executable, *words], **pipes, text=True, env=environment, cwd=ROOT)

    def say(self, word: str) -> None:
        """Say a word and wait until it comes back."""
        assert self.child.stdin is not None
        self.child.stdin.write(word + "\n")
        self.child.stdin.flush()
        assert self.line() == word

    def line(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().rstrip("\n")

    def lines_until(self, start: str) -> list[str]:
        lines = [self.line()]
        while not lines[-1].startswith(start):
            assert lines[-1], f"no line begins with {start!r}"
            lines.append(self.line())
        return lines

    def end(self) -> tuple[int, str, str]:
        out, err = self.child.communicate(timeout=60)
        return self.child.returncode, out, err


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Process]:
    process = Process(str(ROOT / "tests/integration/led_writer.py"), str(tmp_path / "run"))
    yield process
    process.child.kill()
    process.child.communicate()


@pytest.fixture
def watcher(tmp_path: Path, writer: Process) -> Iterator[Process]:
    """A watcher of a run that has begun and of which nothing is known yet."""
    writer.say("wait")
    process = Process("-c", WATCH, "watch", str(tmp_path / "run"))
    yield process
    process.child.kill()
    process.child.communicate()


def test_a_run_is_followed_from_its_first_row_to_its_last(writer: Process, watcher: Process) -> None:
    writer.say("run")
    assert watcher.line().startswith("run demo: task digits_impaired")
    for epoch in range(3):
        writer.say("epoch")
        assert watcher.lines_until(f"epoch {epoch}/8")
    writer.say("end")
    assert writer.end()[0] == 0

    code, out, err = watcher.end()
    assert (code, err) == (0, "")
    *_, episode, last = out.splitlines()
    assert episode.startswith("episode 0 ended (horizon)")
    assert last.endswith("run has finished after epoch 8 of 8")


def test_a_run_that_is_killed_has_stopped(writer: Process, watcher: Process) -> None:
    writer.say("run")
    for _ in range(4):
        writer.say("epoch")
    watcher.lines_until("epoch 3/8")
    writer.child.kill()

    code, out, err = watcher.end()
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].endswith("run has stopped after epoch 3 of 8")


def test_a_run_that_is_killed_before_its_first_row_has_stopped(writer: Process, watcher: Process) -> None:
    writer.child.kill()

    code, out, _ = watcher.end()
    assert (code, out.count("\n")) == (0, 1)
    assert out.endswith("run has stopped before it recorded anything\n")


def test_ctrl_c_ends_watching_quietly_and_not_the_run(writer: Process, watcher: Process) -> None:
    writer.say("run")
    watcher.lines_until("stages:")
    watcher.child.send_signal(signal.SIGINT)

    assert watcher.end() == (0, "", "")
    writer.say("epoch")


# --- runs that are over ---------------------------------------------------------------------------


@pytest.fixture
def training(tmp_path: Path) -> Path:
    seconds = iter(range(100_000))
    with RunWriter(tmp_path / "teach", clock=lambda: float(next(seconds))) as writer:
        for row in fake_training.course(3):
            writer.emit(row)
    return tmp_path / "teach"


def watched(run: Path, **settings: object) -> str:
    """What a terminal of 80 columns and 24 lines was sent."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system=None, width=80, height=24)
    watch(open_run(run), WatchConfig.model_validate(settings), console)
    return file.getvalue()


def test_a_training_that_is_over_is_shown_at_once(training: Path) -> None:
    last = watched(training).rsplit("digits_impaired · ppo", 1)[1]

    assert " · stopped · iteration 3/100 · " in last
    assert "slots   iteration 3, environment 3" in last
    assert last.splitlines()[-1].endswith("teach has stopped after iteration 3 of 100")
    assert "slots   iteration 3, environment 1" in watched(training, env=1)


def test_a_log_gets_one_line_per_iteration_at_once(
    training: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["watch", str(training)])

    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == [f"iteration {number}/100" for number in (1, 2, 3)]
    assert lines[-1].endswith("has stopped after iteration 3 of 100")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "esper watch needs a run's directory as its first word"),
        (["nowhere"], "there is no run directory 'nowhere'"),
        (["."], "'.' is not a run's directory"),
        (["RUN", "--env", "4"], "environment 4 is not in this run; it has 4, numbered from 0"),
    ],
)
def test_a_mistake_is_answered_with_a_sentence(
    words: list[str],
    sentence: str,
    training: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Refused,
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert sentence in refused("watch", *(training if word == "RUN" else word for word in words))


# --- a run that is resumed between two looks -------------------------------------------------------


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_run_that_went_back_between_two_looks_is_shown_as_it_is(
    is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iteration 2 is seen with an alert; then the run goes back to 1 and trains 2 and 3 anew."""
    first = RunWriter(tmp_path / "teach")
    writers, file = [first], io.StringIO()

    def write(number: int, *rows: Row) -> None:
        with writers[-1].iteration(number):
            for row in rows:
                writers[-1].emit(row)

    write(0, fake_training.run_row())
    write(1, *fake_training.iteration_rows(1))
    with first.checkpoint() as kept:
        pass
    write(2, *fake_training.iteration_rows(2), fake_training.alert_row("kl_high", 2))

    def go_on(seconds: float) -> None:
        if len(writers) == 1:
            first.close()
            writers.append(RunWriter(tmp_path / "teach", resume_from=kept))
            write(2, *fake_training.iteration_rows(2))
            write(3, *fake_training.iteration_rows(3))
        else:
            writers[1].close()

    monkeypatch.setattr("esper.scripts.watch_command.time.sleep", go_on)
    console = Console(file=file, force_terminal=is_terminal, color_system=None, width=80, height=24)
    watch(open_run(tmp_path / "teach"), WatchConfig(), console)

    if is_terminal:
        last = file.getvalue().rsplit("digits_impaired", 1)[1]
        assert "iteration 3/100" in last
        assert "alerts  none open" in last
        return
    shown = [line.split("  ")[0] for line in file.getvalue().splitlines()]
    assert [line.partition(" in ")[0] for line in shown[:-1]] == [
        *("iteration 1/100", "iteration 2/100", "warning kl_high raised"),
        *("iteration 2/100", "iteration 3/100"),
    ]
    assert shown[-1].endswith("has stopped after iteration 3 of 100")
